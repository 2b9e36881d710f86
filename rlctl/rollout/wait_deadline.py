"""Deadline of the training thread's waits for rollouts (contract 8)."""

from collections.abc import Callable

from rlctl.config.schema import RunSection

Emit = Callable[..., None]
# Longest wait of the training thread before it looks around.
TICK_S = 0.5


class WaitDeadline:
    """Deadline of a wait: a long silence is explained, a silence of `run.deadline_s` ends the run.

    now: seconds of a clock that only advances.
    """

    def __init__(self, now: Callable[[], float], run: RunSection, emit: Emit) -> None:
        self._now = now
        self._run = run
        self._emit = emit
        self._last_progress = now()
        self._last_explained = now()

    def note_progress(self) -> None:
        """Note that something came."""
        self._last_progress = self._now()

    def check(self, last_step: float, explain: Callable[[], str]) -> None:
        """Explain a silence once, and again after as long. Raises RuntimeError at the deadline.

        last_step: when an engine last did something. An engine that samples long answers is not silent.
        """
        now = self._now()
        silence = now - self._last_progress
        # The run ends a tick later than an idle engine is lost, so that the engine is replaced first.
        if min(silence, now - last_step) >= self._run.deadline_s + TICK_S:
            raise RuntimeError(f"nothing was sampled or scored for {silence:.0f} s (run.deadline_s): {explain()}")
        if now - max(self._last_progress, self._last_explained) >= self._run.explain_after_s:
            self._last_explained = now
            self._emit("warning", what=f"{silence:.0f} s without a new group: {explain()}")
