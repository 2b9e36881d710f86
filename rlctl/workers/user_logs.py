"""Logs of a user's code: failures counted by cause (contract 11), and printed output up to a limit.

Control characters are written as visible symbols, because users read logs on a terminal.
"""

import codecs
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rlctl.utils.safe_text import neutral

Emit = Callable[..., None]
# The most causes that are counted separately. Code that a model generates can raise at any number of places.
MAX_CAUSES = 20
_OTHER = "other causes"
# The most bytes of output in an attempt of a run. One line for each rollout could fill a disk in a run of weeks.
MAX_LOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16
# `close` waits at most this long for the last output, because an orphan of the user's code may keep the pipe open.
_ENDING_S = 2.0


class UserFailure(Protocol):
    """A failure of a user's code. `str` gives its text, one line."""

    @property
    def cause(self) -> str:
        """Kind and place of the failure, without text of a rollout. Failures with equal causes are counted together."""

    @property
    def trace(self) -> str: ...


class FailureLog:
    """Log of the failures of a run's rewards, environments or tools. Warns about the first failure of each cause.

    Any thread may call its methods. kind: "reward", "environment" or "tool". path: file for tracebacks; None: there is
    no file. emit: writes an event; None: there are no warnings. fate: end of a warning, which says what happens to
    the rollouts. metric: name of the metric that counts the failures; "": KIND/failed.
    """

    def __init__(
        self,
        kind: str,
        path: Path | None = None,
        emit: Emit | None = None,
        fate: str = "its rollouts are left out and counted",
        metric: str = "",
    ) -> None:
        self._kind = kind
        self._path = path
        self._emit = emit
        self._fate = fate
        self._metric = metric or f"{kind}/failed"
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._noted: set[str] = set()

    def add(self, name: str, failure: UserFailure, fate: str | None = None, count: int = 1) -> None:
        """Count failures of the reward, environment or tool `name`. For a new cause, log its traceback and warn.

        fate: replaces the log's `fate`. count: number of failures.
        """
        cause = f"{name}: {failure.cause}"
        with self._lock:
            if cause not in self.counts and len(self.counts) >= MAX_CAUSES:
                cause = _OTHER
            is_new = cause not in self.counts
            self.counts[cause] += count
            has_trace_file = False
            if is_new and self._path and failure.trace:
                has_trace_file = _append(self._path, f"{name}: {failure}\n{failure.trace}\n")
        if not is_new or not self._emit:
            return
        if cause == _OTHER:
            summary = f"{self._kind}s fail for more than {MAX_CAUSES} causes"
        else:
            summary = f"{self._kind} {name}: {failure}"
        trace_hint = ""
        if self._path and has_trace_file:
            folder = Path.cwd()
            path = self._path.relative_to(folder) if self._path.is_relative_to(folder) else self._path
            trace_hint = f"; traceback: {path}"
        self._emit("warning", what=f"{summary}; {fate or self._fate}, {self._metric}{trace_hint}")

    def note(self, name: str, text: str) -> None:
        """Emit a warning about a problem that is no failure, once for each `name`."""
        with self._lock:
            is_new = name not in self._noted
            self._noted.add(name)
        if is_new and self._emit:
            self._emit("warning", what=f"{self._kind} {name}: {text}")

    def most_common(self) -> str:
        """Return a text with the most common cause and its number of failures; empty if there are none."""
        with self._lock:
            return next((f"{cause} ({count} times)" for cause, count in self.counts.most_common(1)), "")


class OutputLog:
    """Pipe that is copied to a file of at most `MAX_LOG_BYTES`. A user's processes write to `descriptor`.

    Close the log after these processes have ended. kind: "reward" or "environment". emit: writes a warning event when
    the limit is reached.
    """

    def __init__(self, kind: str, path: Path, emit: Emit | None) -> None:
        self._kind = kind
        self._path = path
        self._emit = emit
        self._reading_end, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy_output, name=f"{kind}s-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the last output is in the file, at most 2 s."""
        os.close(self.descriptor)
        self._thread.join(_ENDING_S)

    def _copy_output(self) -> None:
        """Copy the pipe to the file until all writers have closed it."""
        room = MAX_LOG_BYTES
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while output := os.read(self._reading_end, _READ_BYTES):
            # Output beyond the limit is read and dropped, so that the writing process never waits.
            if room < 0:
                continue
            _append(self._path, decoder.decode(output[:room]))
            room -= len(output)
            if room < 0:
                problem = f"{self._kind}s printed more than {MAX_LOG_BYTES / 2**20:g} MiB"
                _append(self._path, f"\n[{problem}: the rest is left out]\n")
                if self._emit:
                    self._emit("warning", what=f"{problem}: {self._path.name} has no more of it")
        os.close(self._reading_end)


def _append(path: Path, text: str) -> bool:
    """Append text to a file. Return False if writing fails, because a full disk must not end a run."""
    try:
        with path.open("ab") as file:
            file.write(neutral(text).encode())
    except OSError:
        return False
    return True
