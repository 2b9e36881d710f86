"""Writers of events.jsonl (occurrences of a run) and metrics.jsonl (numbers of a step).

Contract 7: dashboard, lines, summary and reports read these files and nothing else. Times are unix seconds.
Kinds of events: run_started, chosen, startup, started, phase, refit_opened, checkpoint, validation_started, prompts,
warning, error, engine_lost, engine_restarted, engine_gone, redrawn, dispatch, restart, submitted, run_ended.
Metric names, units and meanings are in `metrics.py`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlctl.telemetry.jsonl import JsonlWriter, Record


class Tracker(Protocol):
    """A receiver of the numbers of metrics.jsonl, and of groups of rollouts: TensorBoard, Weights & Biases."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class EventLog(JsonlWriter):
    """The event log of a run. `emit` never raises and may be called from any thread.

    - run_started: name, algorithm, model, num_steps, start_step (steps already done), attempt,
      device (cpu or cuda), devices {trainer, generator}, ranks, engines, shared (devices), and `process.identity()`
    - startup: what; without `seconds` at its begin, with `seconds` at its end
    - phase: step, name; begins now and lasts until the next phase
    - run_ended: status (done, failed, interrupted or stopped), reason, next (commands to paste)
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._now = now

    def emit(self, kind: str, **fields: Any) -> None:
        self.write({"time": self._now(), "kind": kind, **fields})


class MetricsLog:
    """metrics.jsonl: one flat record a step, a validation or a checkpoint (kind "step", "validation", "checkpoint").

    A value that is no finite number is left out, and reported as one warning event a name. Trackers receive the written
    numbers.
    """

    def __init__(
        self,
        path: Path,
        events: EventLog,
        trackers: Sequence[Tracker] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._writer = JsonlWriter(path)
        self._events = events
        self._trackers = trackers
        self._now = now
        self._refused: set[str] = set()

    @property
    def lost(self) -> int:
        """Number of records that could not be written."""
        return self._writer.lost

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        clean = {name: number for name, value in metrics.items() if (number := self._number(name, value)) is not None}
        self._writer.write({"kind": kind, "step": step, "time": self._now(), **clean})
        for tracker in self._trackers:
            tracker.write(kind, step, clean)

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        """Pass groups of rollouts to the trackers."""
        for tracker in self._trackers:
            tracker.samples(purpose, step, groups)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _number(self, name: str, value: Any) -> float | int | None:
        number = as_number(value)
        if number is None and name not in self._refused:
            self._refused.add(name)
            shown = repr(value)
            self._events.emit("warning", what=f"metric {name} is no finite number and is left out: {shown[:60]}")
        return number


def as_number(value: Any) -> float | int | None:
    """Return a scalar (also NumPy's, or a 0-d tensor) as a Python number; None for NaN, infinity and all else."""
    if not isinstance(value, (int, float)):
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError, TypeError):
            return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, bool) else value
