"""Checkpoints of a run: `checkpoints/step_N/`, whole or not there at all.

Each is written to `tmp_step_N`, synced, then renamed. The newest `keep_last` and the `keep_best` best by a metric stay.
Apart from the trainer's state a checkpoint has one JSON file: version, data cursor, metric.
A manifest holds the digest of every file; a resume checks the digest before it reads the file.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.errors import UserError
from rlctl.config.run_weights import DAMAGED, checkpoint_folders, newest_folder
from rlctl.preflight.version import earlier_version
from rlctl.run.file_manifest import MANIFEST, find_damage, is_as_written, write_manifest
from rlctl.utils.files import sync
from rlctl.workers.errors import WorkerDied, WorkerTimeout

_STATE = "state.json"
# Descriptors whose locks keep checkpoints from being pruned, until this process ends.
_HELD: list[int] = []
# Path -> (bytes, digest), of files whose writers have synced them and know both.
Known = Mapping[Path, tuple[int, str]]
# Fills the folder of a checkpoint.
Write = Callable[[], Known]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer(self) -> Path:
        """Folder of the trainer's part."""
        return self.path / "trainer"

    @property
    def export(self) -> Path:
        """The Hugging Face folder, if it was asked for."""
        return self.path / "hf"


def damage_of_weights(model: Path) -> str:
    """Return a line on the damage in a checkpoint's Hugging Face folder; empty for a whole one and for any other."""
    checkpoint = model.parent
    if model.name != "hf" or not (checkpoint / _STATE).is_file():
        return ""
    damage = find_damage(checkpoint, "hf/")
    return _damage_line(damage) if damage else ""


def hold(checkpoint: Path) -> bool:
    """Keep a run that still trains on this machine from pruning a checkpoint, until this process ends.

    Return False if the checkpoint is gone. A file system without locks keeps nothing: the run may prune it.
    """
    file = checkpoint / _STATE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    _HELD.append(descriptor)
    with suppress(OSError):
        # Waits for a prune that has begun.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return file.exists()


def stand_in(model: str, newest: Checkpoint | None) -> str | None:
    """Return the export of the newest checkpoint in place of a run's model whose folder is gone.

    None for a model that is here or is no path, and where nothing stands in: adapters and a reference policy need the
    weights of the model itself.
    """
    if newest is None or not Path(model).is_absolute() or os.path.isdir(model):
        return None
    made_with = newest.state.get("made_with") or {}
    stands_in = made_with.get("frozen") is None and (newest.export / "config.json").is_file()
    return str(newest.export) if stands_in else None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; no part is left."""


class NoWholeCheckpoint(UserError):
    """All checkpoints of a run are damaged; the message is one line that names each."""


class EarlierVersion(NoWholeCheckpoint):
    """All checkpoints of a run are of an earlier version of rlctl; the message is one line that says how to go on."""


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run continues from, and the state of its folder."""

    # None for a run without checkpoints.
    checkpoint: Checkpoint | None
    # Newer ones that cannot be used: folder -> the reason in one line.
    damaged: dict[Path, str]
    # Further lines for the user.
    notes: list[str]


class Checkpoints:
    """The checkpoints of one run directory: written, found and pruned here."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Checkpoint:
        """Save a checkpoint, as `begin` and `CheckpointSave.finish` do; `write` fills the folder."""
        return self.begin(step, state, lambda folder: lambda: _nothing_known(write, folder)).finish()

    def begin(self, step: int, state: dict[str, Any], begin: Callable[[Path], Write]) -> "CheckpointSave":
        """Begin a checkpoint. `begin` gets its folder and returns a function that fills the folder.

        `state["score"]` ranks checkpoints: the larger the better, among equals the earlier; None is not ranked.
        Raises as `CheckpointSave.finish`.
        """
        save = CheckpointSave(self, self._folder, step, state)
        save.begin(begin)
        return save

    def all(self) -> list[Checkpoint]:
        """Return the checkpoints whose state can be read, oldest first. Other files are not read.

        Half-written ones of a killed run are left out, and so is anything else in the folder.
        """
        checkpoints = (_read_checkpoint(path, step) for step, path in checkpoint_folders(self._folder))
        return [checkpoint for checkpoint in checkpoints if checkpoint]

    def latest(self) -> Checkpoint | None:
        """Return the newest of `all`."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """Return the one of `all` with the highest score; None where none was scored."""
        return next(iter(_by_score(self.all())), None)

    def latest_as_written(self) -> Checkpoint | None:
        """Return the newest whose state is as it was written. Other files are not read."""
        for step, path in reversed(checkpoint_folders(self._folder)):
            checkpoint = _read_checkpoint(path, step) if is_as_written(path, _STATE) else None
            if checkpoint:
                return checkpoint
        return None

    def damage_of_newest(self) -> tuple[int, str] | None:
        """Return the step of the newest folder, and a line on its state if that is not as it was written.

        A folder that a resume set aside is damaged, see `newest_folder`. Other files are not read. None for a run
        without a folder.
        """
        newest = newest_folder(self._folder)
        if newest is None:
            return None
        step, path = newest
        if path.name.startswith(DAMAGED):
            return step, f"{path}: damaged, as a resume has found"
        if damage := find_damage(path, _STATE):
            return step, _damage_line(damage)
        return step, "" if _read_checkpoint(path, step) else f"{path / _STATE}: not the state of step {step}"

    def newest_whole(self) -> Found:
        """Read every file of the newest checkpoint, and of the next older one if any is not as it was written.

        Raises NoWholeCheckpoint if there are checkpoints, but none whole, and EarlierVersion.
        """
        self.refuse_earlier()
        damaged: dict[Path, str] = {}
        folders = {path for _, path in checkpoint_folders(self._folder)}
        strangers = sorted(path for path in self._folder.glob("step_*") if path not in folders)
        notes = [f"{path}: no checkpoint of rlctl, left alone" for path in strangers]
        for step, path in reversed(checkpoint_folders(self._folder)):
            damage = find_damage(path)
            export_damage = {file: text for file, text in damage.items() if path / "hf" in file.parents}
            if len(damage) > len(export_damage):
                damaged[path] = _damage_line({file: text for file, text in damage.items() if file not in export_damage})
                continue
            checkpoint = _read_checkpoint(path, step)
            if checkpoint is None:
                damaged[path] = f"{path / _STATE}: not the state of step {step}"
                continue
            if export_damage:
                notes.append(
                    f"{_damage_line(export_damage)}; the export alone is damaged, which a resume does not read"
                )
            return Found(checkpoint, damaged, notes)
        if damaged:
            raise NoWholeCheckpoint(f"{'; '.join(damaged.values())}; {self._folder} has no whole checkpoint")
        return Found(None, damaged, notes)

    def refuse_earlier(self) -> None:
        """Raise EarlierVersion if all checkpoints are of an earlier version of rlctl."""
        folders = checkpoint_folders(self._folder)
        if folders and all(_is_earlier(path, step) for step, path in folders):
            raise EarlierVersion(earlier_version(self._folder.parent, f"its checkpoints have no {MANIFEST}"))

    def set_aside(self, damaged: Path) -> Path:
        """Rename a damaged checkpoint to `damaged_step_N`, until a newer one is saved; return its new path."""
        aside = damaged.with_name(f"{DAMAGED}{damaged.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(damaged, aside)
        with suppress(OSError):
            # Checkpoints that are saved from now on are newer.
            os.utime(aside)
        return aside

    def prune(self) -> None:
        """Remove old checkpoints, unfinished folders, and damaged checkpoints of steps that the run has passed."""
        checkpoints = self.all()
        newest = checkpoints[-self._keep_last :]
        best = _by_score(checkpoints)[: self._keep_best]
        steps_to_keep = {checkpoint.step for checkpoint in newest + best}
        for checkpoint in checkpoints:
            if checkpoint.step not in steps_to_keep:
                _remove_unless_held(checkpoint.path)
        for leftover in self._folder.glob("tmp_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for step, path in checkpoint_folders(self._folder, DAMAGED):
            # The run has passed the step of the damaged checkpoint.
            if step <= checkpoints[-1].step:
                shutil.rmtree(path, ignore_errors=True)


class CheckpointSave:
    """A checkpoint that is being written: `finish` may run on another thread than the one that began it."""

    def __init__(self, checkpoints: Checkpoints, folder: Path, step: int, state: dict[str, Any]) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._folder = folder
        self._state = state
        # JSON of the state as it was at `begin`: training goes on and changes the state.
        self._text = ""
        self._temporary = folder / f"tmp_step_{step}"
        self._final = folder / f"step_{step}"
        self._write: Write = dict
        self._abandoned = False

    def begin(self, begin: Callable[[Path], Write]) -> None:
        """Make the folder, and have `begin` take what it needs of the moment."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        with self._whole_or_nothing():
            self._text = json.dumps({"step": self._step, **self._state})
            self._temporary.mkdir(parents=True)
            self._write = begin(self._temporary)

    def finish(self) -> Checkpoint:
        """Fill the folder, then give it its name: it is whole or not there at all.

        Raises CheckpointError (a full disk, say), or the loss of a worker, after removing the unfinished folder;
        earlier ones stay untouched.
        """
        with self._whole_or_nothing():
            synced_files = self._write()
            (self._temporary / _STATE).write_text(self._text)
            write_manifest(self._temporary, written_files=synced_files)
            for path in (*self._temporary.rglob("*"), self._temporary):
                if path not in synced_files:
                    sync(path)
            if self._abandoned:
                raise CheckpointError(f"the checkpoint of step {self._step} was given up")
        if self._final.exists():
            _remove_checkpoint(self._final)
        os.replace(self._temporary, self._final)
        sync(self._folder)
        self._checkpoints.prune()
        return Checkpoint(self._final, self._step, self._state)

    def abandon(self) -> None:
        """Let `finish` neither name nor remove the folder: it may belong to a later save of the same step."""
        self._abandoned = True

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._abandoned:
                shutil.rmtree(self._temporary, ignore_errors=True)
            # A lost worker is no fault of the checkpoint: the run begins again from the one before.
            if isinstance(error, Exception) and not isinstance(error, WorkerDied | WorkerTimeout | CheckpointError):
                raise CheckpointError(f"no checkpoint of step {self._step} in {self._folder}: {error}") from error
            raise


def _nothing_known(write: Callable[[Path], None], folder: Path) -> Known:
    write(folder)
    return {}


def _read_checkpoint(path: Path, step: int) -> Checkpoint | None:
    try:
        state = json.loads((path / _STATE).read_text())
        return Checkpoint(path, step, state) if state["step"] == step else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _by_score(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Return those with a score, the best first; the earlier among equals."""
    scored = [checkpoint for checkpoint in checkpoints if checkpoint.state.get("score") is not None]
    return sorted(scored, key=lambda checkpoint: (-checkpoint.state["score"], checkpoint.step))


def _is_earlier(path: Path, step: int) -> bool:
    """Return True for a checkpoint from before there were manifests."""
    checkpoint = None if (path / MANIFEST).exists() else _read_checkpoint(path, step)
    return checkpoint is not None and "made_with" not in checkpoint.state


def _damage_line(damage: dict[Path, str]) -> str:
    """Return the first damage, and the count of the others."""
    path, text = next(iter(damage.items()))
    return f"{path}: {text}" + (f" (and {len(damage) - 1} more)" if len(damage) > 1 else "")


def _remove_unless_held(checkpoint: Path) -> None:
    """Remove a checkpoint. One that another process reads, see `hold`, is left for a later time."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(checkpoint / _STATE, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            # It is held, or gone already.
            return
        except OSError:
            # A file that cannot be written, or a file system without locks: nothing is held.
            pass
        _remove_checkpoint(checkpoint)


def _remove_checkpoint(folder: Path) -> None:
    # Renamed first: a kill halfway through must not leave a checkpoint that looks whole.
    aside = folder.with_name(f"tmp_old_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
