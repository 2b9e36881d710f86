"""The clock of one step: named phases and named idle times that add up to its wall time (contract 5).

`time/step` equals the sum of every other `time/*` of the step; `time/other` is the time outside every phase.
`StepClock` takes its time source as an argument and writes nothing. `StepRecorder` alone writes events.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlctl.telemetry.events import EventLog
from rlctl.telemetry.metrics import IN_ASYNC, STEP_TIME, Metric, ReportChart, rows_where

PHASES = ReportChart(STEP_TIME, "Phases of a step", 20, stacked=True)
# ruff must not split the rows of this table over more lines.
# fmt: off
STEP_SECONDS = Metric("time/step", "wall time of the step, seconds", "seconds", chart=None)
TRAIN_SECONDS = Metric("time/train", "seconds", "seconds", chart=PHASES)
GENERATION_SECONDS = Metric("time/generation", "seconds", "seconds", chart=PHASES)
OTHER_SECONDS = Metric("time/other", "the driver's own time, seconds", "seconds", chart=PHASES)
VALIDATION_SECONDS = Metric("time/validation", "seconds", "seconds", chart=ReportChart(STEP_TIME, "Validation", 10))
CHECKPOINT_SECONDS = Metric("time/checkpoint",
    "seconds from the begin of a checkpoint until it is whole, in a record of its own", "seconds", chart=PHASES)
METRICS = (
    STEP_SECONDS, TRAIN_SECONDS, GENERATION_SECONDS, OTHER_SECONDS, VALIDATION_SECONDS, CHECKPOINT_SECONDS,
    Metric("time/checkpoint_stopped", "seconds of it without training (checkpoint.beside_training)", "seconds",
        chart=PHASES),
    *rows_where(
        IN_ASYNC,
        Metric("time/idle_rollouts", "seconds in which the trainer waited for rollouts to be sampled", "seconds",
            chart=PHASES),
        Metric("time/idle_scores", "seconds in which the trainer waited for rewards", "seconds", chart=PHASES),
        Metric("time/idle_oldest",
            "seconds in which the trainer waited for the oldest group, which the bound on age puts first", "seconds",
            chart=PHASES),
    ),
    Metric("time/NAME", "seconds", "seconds", chart=PHASES),
)
# fmt: on
# Phases whose seconds throughput leaves out of a step's wall time.
APART = (VALIDATION_SECONDS.name, CHECKPOINT_SECONDS.name)


class StepClock:
    """Clock of one step, from its construction to `finish`.

    Phases do not overlap. Several phases of a step may have the same name: their seconds are added.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._spans: defaultdict[str, float] = defaultdict(float)
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to `time/NAME`. A phase idle_X is a wait for X, for example idle_rollouts.

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
        return {**self._spans, OTHER_SECONDS.name: other, STEP_SECONDS.name: wall}


class StepRecorder(StepClock):
    """A `StepClock` that also writes an event "phase" when a phase begins."""

    def __init__(self, events: EventLog, step: int) -> None:
        super().__init__()
        self._events = events
        self._step = step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Write the event "phase", and add the block's seconds to `time/NAME`."""
        self._events.emit("phase", step=self._step, name=name)
        with super().phase(name):
            yield


def productive_seconds(times: dict[str, float]) -> float:
    """Return the wall seconds of a step without validation and checkpoint: the base of throughput and idle shares."""
    return times[STEP_SECONDS.name] - sum(times.get(name, 0.0) for name in APART)
