"""Checkpoints of a run: `checkpoints/step_N/`. A checkpoint is complete, or does not exist.

Each checkpoint is written to `tmp_step_N`, synced, then renamed. The newest `keep_last` checkpoints and the `keep_best`
best ones by a metric are kept. Besides the trainer's state a checkpoint has one JSON file: version, data cursor,
metric. A manifest has the digest of every file. A resume verifies the digests before it reads the files.
`training/rank_checkpoint.py` writes tensors, and `launch/resume.py` prepares a resume.
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
# Open files with the locks of `hold`, which last until this process ends.
_HELD: list[int] = []
# Path -> (bytes, digest) of files that their writers have synced and hashed already.
Known = Mapping[Path, tuple[int, str]]
# Writes the files of a checkpoint; returns those that are synced and hashed already.
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
    def critic(self) -> Path:
        """Folder of the critic's part. It exists only in a run with a critic."""
        return self.path / "critic"

    @property
    def export(self) -> Path:
        """Hugging Face folder of the weights. It exists only if the config asks for an export."""
        return self.path / "hf"


def damage_of_weights(model: Path) -> str:
    """Return a line on the damage in the Hugging Face folder of a checkpoint. Return "" for an undamaged folder, and
    for folders that are not a part of a checkpoint."""
    checkpoint = model.parent
    if model.name != "hf" or not (checkpoint / _STATE).is_file():
        return ""
    damage = find_damage(checkpoint, "hf/")
    return _damage_line(damage) if damage else ""


def hold(checkpoint: Path) -> bool:
    """Protect a checkpoint from pruning by its run, which may still train on this machine, until this process ends.

    Return False if the checkpoint is gone. On a file system without locks the run may prune it nevertheless.
    """
    file = checkpoint / _STATE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    _HELD.append(descriptor)
    with suppress(OSError):
        # If the run is removing the checkpoint, this waits until it is gone.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return file.exists()


def stand_in(model: str, newest: Checkpoint | None) -> str | None:
    """Return the newest checkpoint's Hugging Face folder, to use it for a run's model whose folder is gone.

    Return None if the model's folder exists or the model is no path, or if the checkpoint has no export. Return None
    for runs with adapters or a reference policy too, because they need the weights of the model itself.
    """
    if newest is None or not Path(model).is_absolute() or os.path.isdir(model):
        return None
    made_with = newest.state.get("made_with") or {}
    # `frozen` is the digest of the base of adapters, or of the reference policy.
    stands_in = made_with.get("frozen") is None and (newest.export / "config.json").is_file()
    return str(newest.export) if stands_in else None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Its unfinished folder was removed."""


class NoWholeCheckpoint(UserError):
    """All checkpoints of a run are damaged. The message is one line that names the damage of each."""


class EarlierVersion(NoWholeCheckpoint):
    """All checkpoints of a run are of an earlier version of rlctl. The message is one line with the remedy."""


@dataclass(frozen=True)
class Found:
    """The checkpoint from which a run continues, and the damaged checkpoints that it skips."""

    # None for a run without checkpoints.
    checkpoint: Checkpoint | None
    # Folder of a newer checkpoint that cannot be used -> reason in one line.
    damaged: dict[Path, str]
    # Further lines for the user.
    notes: list[str]


class Checkpoints:
    """Writes, finds and prunes the checkpoints in one folder, `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Checkpoint:
        """Save a checkpoint at once, by `begin` and `CheckpointSave.finish`. write: fills the folder."""

        def begin_files(folder: Path) -> Write:
            def write_files() -> Known:
                write(folder)
                # No file is synced or hashed yet.
                return {}

            return write_files

        return self.begin(step, state, begin_files).finish()

    def begin(self, step: int, state: dict[str, Any], begin_files: Callable[[Path], Write]) -> "CheckpointSave":
        """Begin a checkpoint. begin_files: called with its folder; returns a function that writes the files.

        `state["score"]` ranks checkpoints: a larger score is better, and of equal scores the earlier step. A checkpoint
        with score None is not ranked. Raises the errors of `CheckpointSave.finish`.
        """
        save = CheckpointSave(self, self._folder, step, state)
        save.begin(begin_files)
        return save

    def all(self) -> list[Checkpoint]:
        """Return the checkpoints whose state file can be read, oldest first. Their other files are not read.

        Unfinished checkpoints of a killed run and other files in the folder are ignored.
        """
        checkpoints = (_read_checkpoint(path, step) for step, path in checkpoint_folders(self._folder))
        return [checkpoint for checkpoint in checkpoints if checkpoint]

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint of `all`; None if there is none."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint of `all` with the highest score; None if none has a score."""
        return next(iter(_by_score(self.all())), None)

    def latest_as_written(self) -> Checkpoint | None:
        """Return the newest checkpoint whose state file is undamaged. Other files are not read."""
        for step, path in reversed(checkpoint_folders(self._folder)):
            checkpoint = _read_checkpoint(path, step) if is_as_written(path, _STATE) else None
            if checkpoint:
                return checkpoint
        return None

    def damage_of_newest(self) -> tuple[int, str] | None:
        """Return (step, damage) of the newest checkpoint folder; None if there is no folder.

        damage: one line if the state file is damaged, or if a resume has marked the folder as damaged; else "". Other
        files are not read.
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
        """Return the newest undamaged checkpoint. Verify every file of the newest one; if it is damaged, of the next.

        Raises NoWholeCheckpoint if all checkpoints are damaged, and EarlierVersion if all are of an earlier version.
        """
        self.refuse_earlier()
        damaged: dict[Path, str] = {}
        folders = {path for _, path in checkpoint_folders(self._folder)}
        strangers = sorted(path for path in self._folder.glob("step_*") if path not in folders)
        notes = [f"{path}: no checkpoint of rlctl, left alone" for path in strangers]
        for step, path in reversed(checkpoint_folders(self._folder)):
            damage = find_damage(path)
            # A resume reads all files but the export's, so damage there alone does not matter.
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
            # Set its time to now, so that later checkpoints are newer.
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
            # The run has saved a checkpoint at or after the damaged one's step.
            if step <= checkpoints[-1].step:
                shutil.rmtree(path, ignore_errors=True)


class CheckpointSave:
    """A checkpoint that is being written. `finish` may run on another thread than `begin`."""

    def __init__(self, checkpoints: Checkpoints, folder: Path, step: int, state: dict[str, Any]) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._folder = folder
        self._state = state
        # JSON of the state at the time of `begin`, because training continues and changes the state.
        self._text = ""
        self._temporary = folder / f"tmp_step_{step}"
        self._final = folder / f"step_{step}"
        self._write: Write = dict
        self._abandoned = False

    def begin(self, begin_files: Callable[[Path], Write]) -> None:
        """Make the folder, and call `begin_files`, which copies all state that training may change afterwards."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        with self._whole_or_nothing():
            self._text = json.dumps({"step": self._step, **self._state})
            self._temporary.mkdir(parents=True)
            self._write = begin_files(self._temporary)

    def finish(self) -> Checkpoint:
        """Fill the folder, sync it, and rename it to its final name.

        On an error the unfinished folder is removed, and earlier checkpoints stay. Raises CheckpointError, for example
        for a full disk, or the error of a lost worker.
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
        """Give up the save: `finish` then neither renames nor removes the folder, because a later save may use it."""
        self._abandoned = True

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Remove the unfinished folder if the block raises. Raise CheckpointError, or the error of a lost worker."""
        try:
            yield
        except BaseException as error:
            if not self._abandoned:
                shutil.rmtree(self._temporary, ignore_errors=True)
            # The loss of a worker is raised as it is: the run restarts from the previous checkpoint.
            if isinstance(error, Exception) and not isinstance(error, WorkerDied | WorkerTimeout | CheckpointError):
                raise CheckpointError(f"no checkpoint of step {self._step} in {self._folder}: {error}") from error
            raise


def _read_checkpoint(path: Path, step: int) -> Checkpoint | None:
    try:
        state = json.loads((path / _STATE).read_text())
        return Checkpoint(path, step, state) if state["step"] == step else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _by_score(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints with a score, the best first; of equal scores, the earlier step first."""
    scored = [checkpoint for checkpoint in checkpoints if checkpoint.state.get("score") is not None]
    return sorted(scored, key=lambda checkpoint: (-checkpoint.state["score"], checkpoint.step))


def _is_earlier(path: Path, step: int) -> bool:
    """Return True for a checkpoint written by an earlier version of rlctl, without a manifest."""
    checkpoint = None if (path / MANIFEST).exists() else _read_checkpoint(path, step)
    return checkpoint is not None and "made_with" not in checkpoint.state


def _damage_line(damage: dict[Path, str]) -> str:
    """Return a line with the first damage and the number of the others."""
    path, text = next(iter(damage.items()))
    return f"{path}: {text}" + (f" (and {len(damage) - 1} more)" if len(damage) > 1 else "")


def _remove_unless_held(checkpoint: Path) -> None:
    """Remove a checkpoint, unless another process holds it (see `hold`)."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(checkpoint / _STATE, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            # The checkpoint is held, or gone already.
            return
        except OSError:
            # The file cannot be written, or the file system has no locks: no process can hold the checkpoint.
            pass
        _remove_checkpoint(checkpoint)


def _remove_checkpoint(folder: Path) -> None:
    # Renamed first: otherwise a kill during the removal could leave a checkpoint that looks complete.
    aside = folder.with_name(f"tmp_old_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
