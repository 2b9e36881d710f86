"""Writers of events.jsonl (occurrences of a run) and metrics.jsonl (numbers of a step).

The dashboard, the plain log, the summary and the reports read these files and nothing else (contract 7). Times are
unix seconds. Within a run they never decrease.
Kinds of events: run_started, chosen, startup, started, phase, refit_opened, checkpoint, validation_started, prompts,
warning, error, engine_lost, engine_restarted, engine_gone, redrawn, dispatch, restart, submitted, run_ended.
Metric names, units and meanings are in `metrics.py`.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlctl.telemetry.jsonl import JsonlWriter, Record, last_record
from rlctl.utils.process import uptime_s

# A recorded time further ahead of now than this comes from a damaged record, and is ignored.
_MOST_AHEAD_S = 86_400.0


class Tracker(Protocol):
    """A receiver of metrics and of groups of rollouts, for example TensorBoard or Weights & Biases."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class RunClock:
    """Unix seconds that never decrease, also when the machine's clock is set back. Thread-safe.

    Readers compare times to find new records, and to tell the attempts of a run apart.
    """

    def __init__(self, *files: Path) -> None:
        """Start the clock no earlier than the last record of each of `files`."""
        newest = [as_number(last_record(file).get("time")) or 0.0 for file in files]
        self._time = max(seconds for seconds in [0.0, *newest] if seconds < time.time() + _MOST_AHEAD_S)
        self._uptime = uptime_s()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            uptime = uptime_s()
            # If the machine's clock was set back, advance by the time that has passed.
            self._time = max(time.time(), self._time + uptime - self._uptime)
            self._uptime = uptime
            return self._time


class EventLog(JsonlWriter):
    """The event log of a run. `emit` never raises and may be called from any thread.

    - run_started: name, algorithm, model, num_steps, start_step (steps already done), attempt,
      device (cpu or cuda), devices {trainer, generator}, ranks, engines, shared (devices), and `process.identity()`
    - startup: what (a stage of the start); written without `seconds` when it begins, with `seconds` when it ends
    - phase: step, name; begins now and lasts until the next phase
    - run_ended: status (done, failed, interrupted or stopped), reason, next (commands to paste)
    """

    def __init__(self, path: Path, now: Callable[[], float] | None = None) -> None:
        super().__init__(path)
        # Time source of every record of the run, in both files.
        self.now = now or RunClock(path, path.with_name("metrics.jsonl"))

    def emit(self, kind: str, **fields: Any) -> None:
        self.write({"time": self.now(), "kind": kind, **fields})


class MetricsLog:
    """metrics.jsonl: one flat record a step, a validation or a checkpoint (kind "step", "validation", "checkpoint").

    A value that is not a finite number is left out. The first time this happens to a metric name, a warning event says
    so. Trackers receive the same numbers as the file.
    """

    def __init__(
        self,
        path: Path,
        events: EventLog,
        trackers: Sequence[Tracker] = (),
        now: Callable[[], float] | None = None,
    ) -> None:
        self._writer = JsonlWriter(path)
        self._events = events
        self._trackers = trackers
        self._now = now or events.now
        self._refused: set[str] = set()

    @property
    def num_lost(self) -> int:
        """Number of records that could not be written."""
        return self._writer.num_lost

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = dict[str, float | int]()
        for name, value in metrics.items():
            number = as_number(value)
            if number is None:
                self._warn_once(name, value)
            else:
                numbers[name] = number
        self._writer.write({"kind": kind, "step": step, "time": self._now(), **numbers})
        for tracker in self._trackers:
            tracker.write(kind, step, numbers)

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        """Pass groups of rollouts to the trackers."""
        for tracker in self._trackers:
            tracker.samples(purpose, step, groups)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _warn_once(self, name: str, value: Any) -> None:
        if name not in self._refused:
            self._refused.add(name)
            text = repr(value)
            self._events.emit("warning", what=f"metric {name} is no finite number and is left out: {text[:60]}")


def as_number(value: Any) -> float | int | None:
    """Return a scalar (also NumPy's, or a 0-d tensor) as a Python number; None for NaN, infinity and other types."""
    if not isinstance(value, (int, float)):
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError, TypeError):
            return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, bool) else value
