"""Rewards that failed: counted by cause, the first of each cause told, its traceback kept. Contract 11."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlctl.rewards.base import RewardFailure

Emit = Callable[..., None]
# Causes hold no text of a rollout, but code that a reward generates can raise at ever new places.
MAX_CAUSES = 20
_OTHER = "other causes"


class FailureLog:
    """Failures of a run. Methods may be called from any thread.

    path: file of the tracebacks; None: the standard error has them. emit: writes an event; None: nobody is told.
    """

    def __init__(self, path: Path | None = None, emit: Emit | None = None) -> None:
        self._path, self._emit, self._lock = path, emit, threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, name: str, failure: RewardFailure) -> None:
        """Count a failure of the reward called `name`; the first of its cause is told."""
        cause = f"{name}: {failure.cause}"
        with self._lock:
            if cause not in self.counts and len(self.counts) >= MAX_CAUSES:
                cause = _OTHER
            first = cause not in self.counts
            self.counts[cause] += 1
            kept = first and self._keep(f"{name}: {failure}", failure.trace)
        if first and self._emit:
            told = f"; traceback: {_short(self._path)}" if kept and self._path else ""
            what = f"reward {name}: {failure}" if cause != _OTHER else f"rewards fail for more than {MAX_CAUSES} causes"
            self._emit("warning", what=f"{what}; its rollouts are left out and counted, reward/failed{told}")

    def most_common(self) -> str:
        """The cause of most failures with their number; empty where there are none."""
        with self._lock:
            return next((f"{cause} ({count} times)" for cause, count in self.counts.most_common(1)), "")

    def _keep(self, line: str, trace: str) -> bool:
        """Write the traceback, once a cause."""
        if not trace or self._path is None:
            return False
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{line}\n{trace}\n")
        except OSError:  # a full disk must not end scoring
            return False
        return True


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
