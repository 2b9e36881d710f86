"""Time, waits and threads of the buffer and the dispatcher, and the deadline of their waits (contract 8).

Tests put a virtual clock in place of `Clock` and drive every thread's steps themselves.
"""

import threading
import time
from collections.abc import Callable

from rlctl.config.schema import RunSection

Emit = Callable[..., None]
# Longest wait before a waiter looks around.
TICK_S = 0.5


class Clock:
    """Real time and real threads."""

    def now(self) -> float:
        """Return seconds of a clock that only advances."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait until `changed`, which the caller holds, is notified, but no longer than `seconds`."""
        changed.wait(seconds)

    def spawn(self, name: str, step: Callable[[], bool]) -> threading.Thread:
        """Start a thread that calls `step` until it returns False."""

        def run() -> None:
            while step():
                pass

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


class ThreadErrors:
    """First unexpected error of some threads: a defect, which ends the run at once, from the loop's thread.

    changed: condition that is notified, so that whoever waits looks.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._first: BaseException | None = None

    def guarded(self, step: Callable[[], bool]) -> Callable[[], bool]:
        """Return a step of a thread that keeps an error of it, and ends the thread."""

        def run() -> bool:
            try:
                return step()
            except BaseException as error:  # also what ends a thread in silence, as SystemExit
                with self._changed:
                    self._first = self._first or error
                    self._changed.notify_all()
                return False

        return run

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if isinstance(self._first, Exception):
            raise self._first
        if self._first:
            raise RuntimeError(f"a thread ended by {type(self._first).__name__}") from self._first


class Patience:
    """Deadline of a wait: a long silence is explained, a silence of `run.deadline_s` ends the run."""

    def __init__(self, clock: Clock, run: RunSection, emit: Emit) -> None:
        self._clock, self._run, self._emit = clock, run, emit
        self._news = self._explained = clock.now()

    def news(self) -> None:
        """Note that something came."""
        self._news = self._clock.now()

    def check(self, last_step: float, explain: Callable[[], str]) -> None:
        """Explain a silence once, and again after as long. Raises RuntimeError at the deadline.

        last_step: when an engine last did something. Engines at long answers give none for long, and are not silent.
        """
        now = self._clock.now()
        silence = now - self._news
        # A tick later than an engine that does nothing is lost, and replaced, for the same deadline.
        if min(silence, now - last_step) >= self._run.deadline_s + TICK_S:
            raise RuntimeError(f"nothing was sampled or scored for {silence:.0f} s (run.deadline_s): {explain()}")
        if now - max(self._news, self._explained) >= self._run.explain_after_s:
            self._explained = now
            self._emit("warning", what=f"{silence:.0f} s without a new group: {explain()}")
