"""Logs of a run's rewards: failures counted by cause (contract 11), and the output of user functions."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlctl.rewards.base import RewardFailure

Emit = Callable[..., None]
# Causes hold no text of a rollout, but code that a reward generates can raise at ever new places.
MAX_CAUSES = 20
_OTHER = "other causes"
# Bytes of output in an attempt. A line a rollout would fill a disk in the weeks that a run may take.
MAX_LOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16
# A process out of a reward's reach may hold the pipe open for ever.
_ENDING_S = 2.0


class FailureLog:
    """Failures of a run's rewards. The first of each cause is told. Methods may be called from any thread.

    path: file of the tracebacks; None: the standard error has them. emit: writes an event; None: nobody is told.
    """

    def __init__(self, path: Path | None = None, emit: Emit | None = None) -> None:
        self._path, self._emit, self._lock = path, emit, threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, name: str, failure: RewardFailure) -> None:
        """Count a failure of the reward called `name`. Keep the traceback and emit a warning for a new cause."""
        cause = f"{name}: {failure.cause}"
        with self._lock:
            if cause not in self.counts and len(self.counts) >= MAX_CAUSES:
                cause = _OTHER
            first = cause not in self.counts
            self.counts[cause] += 1
            kept = self._path if first and failure.trace else None
            if kept and not _append(kept, f"{name}: {failure}\n{failure.trace}\n".encode(errors="replace")):
                kept = None
        if first and self._emit:
            here = Path.cwd()
            shown = kept.relative_to(here) if kept and kept.is_relative_to(here) else kept
            told = f"; traceback: {shown}" if shown else ""
            what = f"reward {name}: {failure}" if cause != _OTHER else f"rewards fail for more than {MAX_CAUSES} causes"
            self._emit("warning", what=f"{what}; its rollouts are left out and counted, reward/failed{told}")

    def most_common(self) -> str:
        """Return the cause of most failures with their number; empty where there are none."""
        with self._lock:
            return next((f"{cause} ({count} times)" for cause, count in self.counts.most_common(1)), "")


class OutputLog:
    """Pipe to a file. Reward processes write to its `descriptor`. Close it after they have ended.

    emit: writes the event that the bound was reached.
    """

    def __init__(self, path: Path, emit: Emit | None) -> None:
        self._path, self._emit = path, emit
        self._reading, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="rewards-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the last output is written."""
        os.close(self.descriptor)
        self._thread.join(_ENDING_S)

    def _copy(self) -> None:
        left, bound = MAX_LOG_BYTES, f"{MAX_LOG_BYTES / 2**20:g} MiB"
        while data := os.read(self._reading, _READ_BYTES):
            # Output beyond the bound is read all the same: its writer must never wait.
            if left < 0:
                continue
            _append(self._path, data[:left])
            left -= len(data)
            if left < 0:
                _append(self._path, f"\n[rewards printed more than {bound}: the rest is left out]\n".encode())
                if self._emit:
                    what = f"rewards printed more than {bound}: {self._path.name} has no more of it"
                    self._emit("warning", what=what)
        os.close(self._reading)


def _append(path: Path, data: bytes) -> bool:
    """Return False where nothing can be written: a full disk must not end scoring."""
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        return False
    return True
