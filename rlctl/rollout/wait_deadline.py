"""Deadline of the training thread's waits for rollouts (contract 8)."""

from collections.abc import Callable

from rlctl.config.schema import RunSection

Emit = Callable[..., None]
# While it waits, the training thread checks for lost engines and long silences at this interval, in seconds.
TICK_S = 0.5


class WaitDeadline:
    """Deadline of a wait: a silence of `run.explain_after_s` emits a warning, one of `run.deadline_s` ends the run.

    A silence is a time in which no rollout and no score arrives. now: returns the seconds of a clock that never goes
    back.
    """

    def __init__(self, now: Callable[[], float], run: RunSection, emit: Emit) -> None:
        self._now = now
        self._run = run
        self._emit = emit
        self._last_progress = now()
        self._last_explained = now()

    def note_progress(self) -> None:
        """Note that a rollout or a score arrived: the silence ends."""
        self._last_progress = self._now()

    def check(self, last_step: float, explain: Callable[[], str]) -> None:
        """Warn about a silence after each `run.explain_after_s`. Raises RuntimeError at the deadline.

        last_step: time at which an engine last did something. An engine that samples long answers is not silent.
        explain: returns the cause of the wait.
        """
        now = self._now()
        silence = now - self._last_progress
        # The run ends a tick later than an idle engine is lost, so that the engine is replaced first.
        if min(silence, now - last_step) >= self._run.deadline_s + TICK_S:
            raise RuntimeError(f"nothing was sampled or scored for {silence:.0f} s (run.deadline_s): {explain()}")
        if now - max(self._last_progress, self._last_explained) >= self._run.explain_after_s:
            self._last_explained = now
            self._emit("warning", what=f"{silence:.0f} s without a new group: {explain()}")
