"""One step as the loops record it: each phase is timed, and announced as an event for the live view."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlctl.telemetry.clock import StepClock
from rlctl.telemetry.events import EventLog


class StepRecorder:
    """A `StepClock` whose phases are also events. `times` after the block are those of `StepClock.finish`."""

    def __init__(self, events: EventLog, step: int) -> None:
        self._events, self._step = events, step
        self._clock = StepClock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `time/NAME`."""
        self._events.emit("phase", step=self._step, name=name)
        with self._clock.phase(name):
            yield

    def finish(self) -> dict[str, float]:
        """Seconds by name, see `StepClock.finish`."""
        return self._clock.finish()
