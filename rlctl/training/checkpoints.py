"""Checkpoints of a run: `checkpoints/step_N/`, whole or not there at all.

Written to `tmp_step_N`, synced, then renamed; the newest `keep_last` and the `keep_best` best by a metric stay.
What a checkpoint holds beside the trainer's state is one JSON file: version, data cursor, best metric.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer(self) -> Path:
        """The trainer's own part."""
        return self.path / "trainer"

    @property
    def export(self) -> Path:
        """The Hugging Face folder, if it was asked for."""
        return self.path / "hf"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; nothing of it is left."""


class Checkpoints:
    """Writes, finds and prunes the checkpoints of one run directory."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Checkpoint:
        """`write` fills the folder it is given with the trainer's part.

        `state["score"]` ranks: the larger the better, of equals the earlier; without one it is no candidate.
        Raises CheckpointError (a full disk, say) after removing what was begun; earlier ones stay untouched.
        """
        temporary, final = self._folder / f"tmp_step_{step}", self._folder / f"step_{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            (temporary / _STATE).write_text(json.dumps({"step": step, **state}))
            _sync(temporary)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, Exception):
                raise CheckpointError(f"no checkpoint of step {step} in {self._folder}: {error}") from error
            raise
        if final.exists():
            _remove(final)
        os.replace(temporary, final)
        _sync_folder(self._folder)
        self._prune()
        return Checkpoint(final, step, state)

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first. Half-written ones of a killed run are not among them."""
        found = []
        for path in self._folder.glob("step_*"):
            if (path / _STATE).exists():
                state = json.loads((path / _STATE).read_text())
                found.append(Checkpoint(path, state["step"], state))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        found = self.all()
        return found[-1] if found else None

    def _prune(self) -> None:
        found = self.all()
        scored = [checkpoint for checkpoint in found if checkpoint.state.get("score") is not None]
        best = sorted(scored, key=lambda checkpoint: (-checkpoint.state["score"], checkpoint.step))
        keep = {c.step for c in found[-self._keep_last :]} | {c.step for c in best[: self._keep_best]}
        for checkpoint in found:
            if checkpoint.step not in keep:
                _remove(checkpoint.path)
        for leftover in self._folder.glob("tmp_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _remove(folder: Path) -> None:
    # Renamed first: a kill halfway through must not leave a checkpoint that looks whole.
    aside = folder.with_name(f"tmp_old_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
