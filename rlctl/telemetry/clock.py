"""The clock of one step: named phases and named idle times that add up to its wall time (contract 5).

`time/step` equals the sum of every other `time/*` of the step; `time/other` is the driver's own time.
Pure: the clock is passed in, and `StepRecorder` alone writes events.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlctl.telemetry.events import EventLog

# Spans that are no part of throughput.
APART = ("time/validation", "time/checkpoint")


class StepClock:
    """Clock of one step, from its construction to `finish`. Spans are exclusive; a name may occur several times."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._spans: defaultdict[str, float] = defaultdict(float)
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's seconds as `time/NAME`; the phase idle_X is a wait for X.

        Raises RuntimeError inside another phase.
        """
        if self._open is not None:
            raise RuntimeError(f"phase {name} begins inside {self._open}: the spans of a step are exclusive")
        self._open = name
        begin = self._now()
        try:
            yield
        finally:
            self._spans[f"time/{name}"] += self._now() - begin
            self._open = None

    def finish(self) -> dict[str, float]:
        """Return seconds by name: `time/PHASE`, `time/other`, and their sum `time/step`."""
        wall = self._now() - self._start
        other = max(0.0, wall - math.fsum(self._spans.values()))
        return {**self._spans, "time/other": other, "time/step": wall}


class StepRecorder(StepClock):
    """A clock whose phases are also events."""

    def __init__(self, events: EventLog, step: int) -> None:
        super().__init__()
        self._events, self._step = events, step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Emit the phase, and count the block's seconds as `time/NAME`."""
        self._events.emit("phase", step=self._step, name=name)
        with super().phase(name):
            yield


def productive_seconds(times: dict[str, float]) -> float:
    """Return the wall seconds of a step without validation and checkpoint: the base of throughput and idle shares."""
    return times["time/step"] - sum(times.get(name, 0.0) for name in APART)
