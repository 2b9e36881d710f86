"""State of a run at an instant, built from the run's files. Dashboard, report and lists read this state.

Methods `apply_*` add one record to the state, without I/O. They accept a record twice, because a file may be read
again. `RunReader` reads the files.
"""

import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.grpo.losses.sections import STEP_MISMATCH
from rlctl.grpo.metric_rows import GENERATED_TOKENS, GREATEST_AGE, PARITY, SAMPLED_TOKENS
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record, Tail, is_sound
from rlctl.telemetry.metrics import METRIC_ROWS, MetricTable, installed_rows, read_rows
from rlctl.telemetry.rollouts_file import newest_group
from rlctl.utils.process import driver_lives
from rlctl.utils.safe_text import neutral

Status = Literal["new", "running", "done", "failed", "interrupted", "stopped", "died"]
# Kinds of events that no list of events shows.
SILENT = {"phase", "startup", "prompts"}
# Number of last steps whose mean time gives the seconds left.
ETA_STEPS = 20


# Number of newest records that a history keeps with all fields.
_WHOLE = 256
# Most points of each series that a live view keeps. A terminal draws fewer.
LIVE_POINTS = 1000


class History:
    """Metrics of a run's steps (or validations): a series for each metric, and the newest records with all fields.

    limit: most points of a series. Each time a series grows beyond it, every second point of the older half is removed.
    None keeps all points, 16 bytes each.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # Newest records by step, the newest last.
        self._newest: dict[int, Record] = {}
        # Name of a metric -> (steps, values), in the order of steps.
        self._series: dict[str, tuple[array[int], array[float]]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps(self) -> Sequence[int]:
        return self._series["step"][0] if "step" in self._series else ()

    @property
    def names(self) -> list[str]:
        """Names of all metrics that some record has as a number."""
        return list(self._series)

    @property
    def last(self) -> Record:
        """Newest record; empty before the first record.

        Also empty after a run went back by more than 256 steps, until its file is read again.
        """
        return next(reversed(self._newest.values()), {})

    def add(self, record: Record) -> None:
        """Add the record of the step `record["step"]`. It replaces an earlier record of the same step."""
        step = int(record["step"])
        if self._newest.get(step) == record:
            return
        is_newest = not self.steps or step > self.steps[-1]
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        if not is_newest:
            # Remove the points of an earlier record of the step: the new one may lack some of its metrics.
            for steps, values in self._series.values():
                _remove_after(steps, values, step - 1, last=step)
        for name, value in numbers.items():
            steps, values = self._series.setdefault(name, (array("q"), array("d")))
            place = bisect_left(steps, step)
            steps.insert(place, step)
            values.insert(place, value)
            if self._limit and len(steps) > self._limit:
                every_second = slice(1, len(steps) // 2, 2)
                del steps[every_second]
                del values[every_second]
        self._newest[step] = record
        if not is_newest:
            self._newest = dict(sorted(self._newest.items()))
        if len(self._newest) > _WHOLE:
            del self._newest[next(iter(self._newest))]

    def drop_after(self, step: int) -> None:
        """Remove the records of all steps after `step`."""
        self._newest = {number: record for number, record in self._newest.items() if number <= step}
        for steps, values in self._series.values():
            _remove_after(steps, values, step)
        self._series = {name: series for name, series in self._series.items() if series[0]}

    def recent(self, count: int) -> list[Record]:
        """Return the last `count` records, oldest first; at most 256."""
        newest = reversed(self._newest.values())
        return [record for _, record in zip(range(count), newest)][::-1]

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """Return (step, value) of each step that recorded the metric, in order."""
        steps, values = self._series.get(name, ((), ()))
        return list(zip(steps, values))

    def values(self, name: str) -> Sequence[float]:
        """Return the values of a metric in the order of steps, without a copy."""
        return self._series.get(name, ((), ()))[1]


def _remove_after(steps: "array[int]", values: "array[float]", step: int, last: int | None = None) -> None:
    """Remove the points of all steps after `step` from a series, in place. last: last step to remove; None: all."""
    begin = bisect_right(steps, step)
    end = len(steps) if last is None else bisect_right(steps, last)
    del steps[begin:end]
    del values[begin:end]


@dataclass
class RunState:
    """A run as its files describe it."""

    name: str
    now: float = 0.0  # unix seconds at which this state holds
    start: Record = field(default_factory=dict)  # event run_started of the newest attempt
    end: Record = field(default_factory=dict)  # event run_ended of this attempt; empty while it runs
    startup: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # part -> (begin, seconds or None)
    phase: tuple[str, int, float] | None = None  # (name, step, begin in unix seconds) of the current phase
    steps: History = field(default_factory=History)
    validations: History = field(default_factory=History)
    checkpoints: dict[int, Record] = field(default_factory=dict)  # step -> event of its checkpoint
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=100))
    health: dict[str, set[int]] = field(default_factory=dict)  # health check -> steps with a warning
    status: Status = "new"
    sample: Record = field(default_factory=dict)  # newest group of rollouts.jsonl, if the reader reads samples
    damaged: dict[str, int] = field(default_factory=dict)  # file -> number of damaged lines, which are left out
    checkpoint_metric: str = ""
    configured_bound: float = float("inf")  # health.max_token_mult_prob_error
    probed_bound: float | None = None  # bound that this attempt's probe found; None means the configured bound
    cuts_distribution: bool = False  # True if generation.top_p or top_k is set
    declared: MetricTable = field(default_factory=installed_rows)  # metrics that the run declares, else installed ones

    @property
    def mismatch_bound(self) -> float:
        """Bound of the run's health check on the metric `judged_mismatch`."""
        return self.configured_bound if self.probed_bound is None else self.probed_bound

    @property
    def bound_source(self) -> str:
        """Origin of `mismatch_bound` in words: the config's key, or the probe."""
        key = "health.max_token_mult_prob_error"
        if self.mismatch_bound == self.configured_bound:
            return key
        return f"twice the rounding that the probe found; {key} is {self.configured_bound:g}"

    @property
    def judged_mismatch(self) -> str:
        """Name of the metric that `mismatch_bound` bounds."""
        # Only tokens that equal weights sampled from the whole distribution are comparable. If older weights or a cut
        # distribution sample, only the parity metric has such tokens.
        needs_parity = self.cuts_distribution or GREATEST_AGE.name in self.last
        return PARITY.name if needs_parity else STEP_MISMATCH.name

    @property
    def algorithm(self) -> str:
        """Algorithm of the run: `grpo` or `sft`."""
        return str(self.start.get("algorithm", "grpo"))

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run; 0 if it is not known."""
        return int(self.start.get("num_steps", 0))

    @property
    def step(self) -> int:
        """Number of finished steps."""
        # A limited series may lack the step at which the attempt began.
        return max([int(self.start.get("start_step", 0)), *self.steps.steps[-1:]])

    @property
    def last(self) -> Record:
        """Record of the newest step; empty before the first, see `History.last`."""
        return self.steps.last

    @property
    def elapsed_s(self) -> float:
        """Seconds since this attempt began."""
        return max(0.0, self.now - float(self.start.get("time", self.now)))

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the run ends, by the mean time of the last steps; None if it cannot be estimated."""
        mean = self.mean(STEP_SECONDS.name, ETA_STEPS)
        since = self.latest("time")
        if mean is None or since is None or self.status != "running":
            return None
        return max(0.0, mean * (self.num_steps - self.step) - (self.now - since))

    def _history(self, name: str) -> History:
        return self.validations if name.startswith("validation/") else self.steps

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """Return (step, value) of each step that recorded a metric, for validation/* of each validation."""
        return self._history(name).series(name)

    def values(self, name: str) -> Sequence[float]:
        """Return the values of a metric in the order of steps."""
        return self._history(name).values(name)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None if it has none."""
        values = self.values(name)
        return values[-1] if values else None

    def latest_of_generator(self, name: str) -> float | None:
        """Return the newest value of a generator's metric, or after the end of a run the value of its last usual step.

        In the last steps of an asynchronous run little is left to sample, so their values say nothing about the
        generator. A usual step samples at least half as many tokens as it trains on.
        """
        if self.status in ("new", "running") and self.step < self.num_steps:
            return self.latest(name)
        for record in reversed(self.steps.recent(len(self.steps))):
            sampled = record.get(SAMPLED_TOKENS.name)
            trained = record.get(GENERATED_TOKENS.name, 0)
            if sampled and sampled >= trained / 2 and name in record:
                return float(record[name])
        return self.latest(name)

    def mean(self, name: str, count: int | None = None) -> float | None:
        """Return the mean of a metric's last `count` values, or of all; None if it has no value."""
        values = self.values(name)[-count:] if count else self.values(name)
        return sum(values) / len(values) if values else None

    def end_with(self, event: Record) -> None:
        """Apply the event run_ended if the run's files lack it, for example because of a full disk."""
        if not self.end:
            self.apply_event(event)
            self.status = event["status"]
            self.now = float(event["time"])

    def events_of_attempt(self) -> list[Record]:
        """Return the newest events since the attempt began."""
        begin = float(self.start.get("time", 0.0))
        return [event for event in self.events if float(event["time"]) >= begin]

    def apply_event(self, event: Record) -> None:
        """Add one event to the state."""
        kind = event.get("kind")
        if kind == "run_started":
            # The attempt repeats the steps after `done`, so their records and events are dropped.
            done = int(event.get("start_step", 0))
            self.start = event
            self.end = {}
            self.phase = None
            self.startup = {}
            self.probed_bound = None
            self.checkpoints = {step: saved for step, saved in self.checkpoints.items() if step <= done}
            self.steps.drop_after(done)
            self.validations.drop_after(done)
            earlier_steps = {check: {step for step in steps if step <= done} for check, steps in self.health.items()}
            self.health = {check: steps for check, steps in earlier_steps.items() if steps}
        elif kind == "startup":
            part = str(event.get("what"))
            time_s = float(event["time"])
            seconds = event.get("seconds")
            if seconds is None:
                self.startup[part] = (time_s, None)
            else:
                # The event of the begin may be missing.
                since, _ = self.startup.get(part, (time_s - seconds, None))
                self.startup[part] = (since, float(seconds))
        elif kind == "probe" and "bound" in event:
            self.probed_bound = float(event["bound"])
        elif kind == "phase":
            self.phase = (str(event.get("name")), int(event.get("step", 0)), float(event["time"]))
        elif kind == "validation_started":
            self.phase = ("validation", int(event.get("step", self.step)), float(event["time"]))
        elif kind == "checkpoint":
            self.checkpoints[int(event["step"])] = event
        elif kind == "warning" and "check" in event:
            self.health.setdefault(str(event["check"]), set()).add(int(event.get("step", 0)))
        elif kind == "submitted":
            # The submitted job has not started its driver yet. The end of an earlier attempt must not count for it.
            self.start = {}
            self.end = {}
            self.phase = None
            self.startup = {}
            self.status = "new"
        elif kind == "run_ended":
            self.end = event
            self.phase = None
        if kind not in SILENT:
            self.events.append(event)

    def apply_metrics(self, record: Record) -> None:
        """Add the record of one step or validation to the state."""
        if record["step"] > self.start.get("start_step", 0) and record["time"] < self.start.get("time", 0.0):
            # An earlier attempt's step after the checkpoint. The resumed run will remove the record from the file.
            return
        if record.get("kind") == "validation":
            self.validations.add(record)
        elif record.get("kind") != "checkpoint":  # the event of the checkpoint has these facts too
            self.steps.add(record)


class RunReader:
    """Reader that follows a run directory and keeps `state` up to date.

    samples: read the newest group of rollouts too. limit: most points of a series, checkpoints, and warnings of a
    check, for a reader of a long run; None: no limit.
    """

    def __init__(self, path: Path, samples: bool = False, limit: int | None = None) -> None:
        self._limit = limit
        self._events = Tail(path / "events.jsonl")
        self._metrics = Tail(path / "metrics.jsonl")
        self._config = path / "config.yaml"
        # Two files that are read as a whole, when their modification times have changed.
        self._rollouts = path / "rollouts.jsonl" if samples else None
        self._rollouts_mtime = 0.0
        self._metric_rows = path / METRIC_ROWS
        self._metric_rows_mtime = 0.0
        # Number of records of each file that lack a needed field, or have another type there.
        self._unsound: Counter[Tail] = Counter()
        # Times of the newest record and of the newest metrics, in unix seconds of the driver's clock.
        self._newest_record_time = 0.0
        self._newest_metrics_time = 0.0
        # Time of the last look at the driver's process, by `time.monotonic`.
        self._driver_checked = -math.inf
        self.state = RunState(
            neutral(path.resolve().name), steps=History(limit=limit), validations=History(limit=limit)
        )

    def poll(self) -> list[Record]:
        """Read the files, and bring `state` up to date; return the new events and metrics in the order of time.

        A restart replaces metrics.jsonl by a file without the steps that will be repeated. Its records are read again,
        but they are not new.
        """
        state = self.state
        events = self._read_sound(self._events, "time", "kind")
        metrics = [_keep_numbers(record) for record in self._read_sound(self._metrics, "time", "step")]
        # Events first: run_started of a resumed run removes the steps that its metrics will repeat.
        for event in events:
            try:
                state.apply_event(event)
            except (KeyError, TypeError, ValueError):
                # A field that this kind of event needs is missing, or has another type.
                state.damaged[self._events.name] += 1
                self._unsound[self._events] += 1
        if events and self._limit:
            newest = slice(-self._limit, None)
            state.checkpoints = {step: state.checkpoints[step] for step in sorted(state.checkpoints)[newest]}
            state.health = {check: set(sorted(steps)[newest]) for check, steps in state.health.items()}
        for record in metrics:
            state.apply_metrics(record)
        if self._rollouts and (modified := _modification_time(self._rollouts)) != self._rollouts_mtime:
            self._rollouts_mtime = modified
            state.sample = newest_group(self._rollouts) or {}
        if (modified := _modification_time(self._metric_rows)) != self._metric_rows_mtime:
            self._metric_rows_mtime = modified
            state.declared = read_rows(self._metric_rows) or installed_rows()
        unseen = [record for record in metrics if record["time"] > self._newest_metrics_time]
        self._newest_metrics_time = max((record["time"] for record in unseen), default=self._newest_metrics_time)
        for record in [*events[-1:], *metrics[-1:]]:
            self._newest_record_time = max(self._newest_record_time, record["time"])
        if not state.checkpoint_metric:
            state.checkpoint_metric, state.configured_bound, state.cuts_distribution = _from_config(self._config)
        if state.end:
            state.status = state.end.get("status", "failed")
            state.now = float(state.end["time"])
        else:
            if state.start and "pid" not in state.start:
                # The event does not name the driver, so nothing can be checked.
                state.status = "running"
            elif state.start and time.monotonic() - self._driver_checked > 2.0:
                self._driver_checked = time.monotonic()
                state.status = "running" if driver_lives(state.start) else "died"
            # The driver's clock may be ahead of this machine's.
            now = max(time.time(), self._newest_record_time)
            state.now = self._newest_record_time if state.status == "died" else now
        news = events + unseen
        news.sort(key=lambda record: float(record["time"]))
        return news

    def _read_sound(self, tail: Tail, *keys: str) -> list[Record]:
        """Return a file's new records that have numbers where needed. Count the other records as damaged."""
        records = tail.read()
        sound = [record for record in records if is_sound(record, keys)]
        self._unsound[tail] += len(records) - len(sound)
        self.state.damaged[tail.name] = tail.damaged + self._unsound[tail]
        return sound


def read_state(path: Path, samples: bool = False) -> RunState:
    """Read a run's files once, and return its state. samples: read the newest group of rollouts too."""
    reader = RunReader(path, samples)
    reader.poll()
    return reader.state


def best_checkpoint(state: RunState) -> tuple[int, float] | None:
    """Return (step, value) of the best checkpoint by `checkpoint.metric` (a leading - means smaller is better)."""
    name = state.checkpoint_metric.removeprefix("-")
    sign = -1.0 if state.checkpoint_metric.startswith("-") else 1.0
    values = dict(state.series(name))
    measured = [(step, values[step]) for step in state.checkpoints if step in values]
    return max(measured, key=lambda pair: (sign * pair[1], -pair[0]), default=None)


def _keep_numbers(record: Record) -> Record:
    return {name: value for name, value in record.items() if name == "kind" or isinstance(value, (int, float))}


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _from_config(config: Path) -> tuple[str, float, bool]:
    """Return from a config.yaml: checkpoint.metric, the bound on the mismatch (infinite if not set), and True if
    top_p or top_k is set."""
    import yaml

    try:
        loaded: Any = yaml.safe_load(config.read_text())
        bound = (loaded.get("health") or {}).get("max_token_mult_prob_error", "inf")
        sampling = loaded.get("generation") or {}
        cuts_distribution = float(sampling.get("top_p", 1)) < 1 or int(sampling.get("top_k", 0)) > 0
        return str(loaded["checkpoint"]["metric"]), float(bound), cuts_distribution
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return "", float("inf"), False
