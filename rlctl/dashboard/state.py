"""State of a run at an instant, folded from its files; everything that shows a run reads it.

`apply_*` are pure folds over records and may see one twice (in a file that is reread); `RunReader` does the reading.
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
# Events on the run's place, not on its history.
SILENT = {"phase", "startup", "prompts"}
ETA_STEPS = 20


# Newest records that a history keeps whole.
_WHOLE = 256
# Points of each series that a live view keeps: a terminal draws fewer.
LIVE_POINTS = 1000


class History:
    """Numbers of a run's steps (or validations) in order, by metric, and the newest records whole.

    limit: the most points of a series. Beyond it every second point of the older half is left out, again and again.
    None: all points stay, 16 bytes each.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # By step, the newest last.
        self._newest: dict[int, Record] = {}
        self._series: dict[str, tuple[array[int], array[float]]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps(self) -> Sequence[int]:
        return self._series["step"][0] if "step" in self._series else ()

    @property
    def names(self) -> list[str]:
        """Return every name with a number in some record."""
        return list(self._series)

    @property
    def last(self) -> Record:
        """Newest record; empty before the first, and where a run went back by more than 256 steps, until a reread."""
        return next(reversed(self._newest.values()), {})

    def add(self, record: Record) -> None:
        """Add the record of `record["step"]`, in place of an earlier one of that step."""
        step = int(record["step"])
        if self._newest.get(step) == record:
            return
        in_order = not self.steps or step > self.steps[-1]
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        if not in_order:
            for steps, values in self._series.values():
                _remove_after(steps, values, step - 1, step)
        for name, value in numbers.items():
            steps, values = self._series.setdefault(name, (array("q"), array("d")))
            place = bisect_left(steps, step)
            steps.insert(place, step)
            values.insert(place, value)
            if self._limit and len(steps) > self._limit:
                older = slice(1, len(steps) // 2, 2)
                del steps[older]
                del values[older]
        self._newest[step] = record
        if not in_order:
            self._newest = dict(sorted(self._newest.items()))
        if len(self._newest) > _WHOLE:
            del self._newest[next(iter(self._newest))]

    def drop_after(self, step: int) -> None:
        """Remove the records of later steps."""
        self._newest = {number: record for number, record in self._newest.items() if number <= step}
        for steps, values in self._series.values():
            _remove_after(steps, values, step)
        self._series = {name: series for name, series in self._series.items() if series[0]}

    def recent(self, count: int) -> list[Record]:
        """Return the last `count` records, oldest first; at most 256."""
        newest = reversed(self._newest.values())
        return [record for _, record in zip(range(count), newest)][::-1]

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """Return (step, value) wherever the metric was recorded, in order."""
        steps, values = self._series.get(name, ((), ()))
        return list(zip(steps, values))

    def values(self, name: str) -> Sequence[float]:
        """Return the values of `series`, without a copy."""
        return self._series.get(name, ((), ()))[1]


def _remove_after(steps: "array[int]", values: "array[float]", step: int, last: int | None = None) -> None:
    """Remove the points of later steps from a series, up to step `last` if there is one."""
    begin = bisect_right(steps, step)
    end = len(steps) if last is None else bisect_right(steps, last)
    del steps[begin:end]
    del values[begin:end]


@dataclass
class RunState:
    """A run as its files describe it."""

    name: str
    now: float = 0.0  # unix seconds of the view
    start: Record = field(default_factory=dict)  # run_started of this attempt
    end: Record = field(default_factory=dict)  # its run_ended
    startup: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # what -> (since, seconds or None)
    phase: tuple[str, int, float] | None = None  # (name, step, since)
    steps: History = field(default_factory=History)
    validations: History = field(default_factory=History)
    checkpoints: dict[int, Record] = field(default_factory=dict)
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=100))
    health: dict[str, set[int]] = field(default_factory=dict)  # warnings: check -> steps
    status: Status = "new"
    sample: Record = field(default_factory=dict)  # newest group of rollouts.jsonl, for views of one
    damaged: dict[str, int] = field(default_factory=dict)  # file -> lines that are left out
    checkpoint_metric: str = ""
    configured_bound: float = float("inf")  # health.max_token_mult_prob_error
    probed_bound: float | None = None  # bound of the steps after this attempt's probe; None: the configured one
    cuts_distribution: bool = False  # generation.top_p or top_k are set
    declared: MetricTable = field(default_factory=installed_rows)  # the run's own rows; those installed if it has none

    @property
    def mismatch_bound(self) -> float:
        """Bound on the judged mismatch, as the run's health checks have it."""
        return self.configured_bound if self.probed_bound is None else self.probed_bound

    @property
    def bound_source(self) -> str:
        """Source of that bound, in words."""
        key = "health.max_token_mult_prob_error"
        if self.mismatch_bound == self.configured_bound:
            return key
        return f"twice the rounding that the probe found; {key} is {self.configured_bound:g}"

    @property
    def judged_mismatch(self) -> str:
        """Metric of the bound, over tokens sampled by the whole distribution of equal weights."""
        # Older weights or a cut distribution sampled the other tokens.
        needs_parity = self.cuts_distribution or GREATEST_AGE.name in self.last
        return PARITY.name if needs_parity else STEP_MISMATCH.name

    @property
    def algorithm(self) -> str:
        """grpo or sft."""
        return str(self.start.get("algorithm", "grpo"))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return int(self.start.get("num_steps", 0))

    @property
    def step(self) -> int:
        """Number of steps done. A bounded series may lack the step that an attempt began at."""
        return max([int(self.start.get("start_step", 0)), *self.steps.steps[-1:]])

    @property
    def last(self) -> Record:
        """Record of the newest step, see `History.last`."""
        return self.steps.last

    @property
    def elapsed_s(self) -> float:
        """Seconds of this attempt."""
        return max(0.0, self.now - float(self.start.get("time", self.now)))

    @property
    def eta(self) -> float | None:
        """Seconds left, by the mean wall time of the last steps; None before the first step."""
        mean = self.mean(STEP_SECONDS.name, ETA_STEPS)
        since = self.latest("time")
        if mean is None or since is None or self.status != "running":
            return None
        return max(0.0, mean * (self.num_steps - self.step) - (self.now - since))

    def _history(self, name: str) -> History:
        return self.validations if name.startswith("validation/") else self.steps

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """Return (step, value) wherever a step, or for validation/* a validation, recorded the metric."""
        return self._history(name).series(name)

    def values(self, name: str) -> Sequence[float]:
        """Return the values of `series`."""
        return self._history(name).values(name)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None before the first."""
        values = self.values(name)
        return values[-1] if values else None

    def latest_of_generator(self, name: str) -> float | None:
        """Return the newest value of a generator's metric; of an ended run, the value of its last usual step.

        In the last steps of an asynchronous run little or nothing is left to sample, so they say nothing about the
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
        """Return the mean over the metric's last `count` values, or all."""
        values = self.values(name)[-count:] if count else self.values(name)
        return sum(values) / len(values) if values else None

    def end_with(self, event: Record) -> None:
        """Apply a run_ended event known to the run's process. Its file may have had no room."""
        if not self.end:
            self.apply_event(event)
            self.status = event["status"]
            self.now = float(event["time"])

    def events_of_attempt(self) -> list[Record]:
        """Return the newest events since the attempt began."""
        begin = float(self.start.get("time", 0.0))
        return [event for event in self.events if float(event["time"]) >= begin]

    def apply_event(self, event: Record) -> None:
        """Fold one event into the state."""
        kind = event.get("kind")
        if kind == "run_started":
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
            # The job's driver has not started yet; the end of an earlier attempt is not its end.
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
        """Fold the record of one step or validation into the state."""
        if record["step"] > self.start.get("start_step", 0) and record["time"] < self.start.get("time", 0.0):
            # The resumed run will cut the record off the file once its checkpoint is loaded.
            return
        if record.get("kind") == "validation":
            self.validations.add(record)
        elif record.get("kind") != "checkpoint":  # the checkpoint's event says as much
            self.steps.add(record)


class RunReader:
    """Follows a run directory and keeps `state` up to date.

    samples: the newest group of rollouts too. limit: the most points of a series, checkpoints, and warnings of a check,
    for a reader that lives long.
    """

    def __init__(self, path: Path, samples: bool = False, limit: int | None = None) -> None:
        self._rollouts = path / "rollouts.jsonl" if samples else None
        self._sampled = 0.0
        self._declared = 0.0
        self._limit = limit
        self._events = Tail(path / "events.jsonl")
        self._metrics = Tail(path / "metrics.jsonl")
        self._config = path / "config.yaml"
        self._rows = path / METRIC_ROWS
        self._checked = -math.inf
        # Records that hold no numbers where numbers belong.
        self._unsound: Counter[Tail] = Counter()
        self._newest = 0.0
        self._newest_metrics = 0.0
        self.state = RunState(
            neutral(path.resolve().name), steps=History(limit=limit), validations=History(limit=limit)
        )

    def poll(self) -> list[Record]:
        """Bring `state` up to date; return the new events and metrics by time.

        A restart replaces metrics.jsonl, without the steps that will be done again; reread records are not new.
        """
        state = self.state
        events = self._read_sound(self._events, "time", "kind")
        metrics = [_keep_numbers(record) for record in self._read_sound(self._metrics, "time", "step")]
        # Events first: run_started of a resumed run clears records that its metrics are about to repeat.
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
        if self._rollouts and (modified := _modification_time(self._rollouts)) != self._sampled:
            self._sampled = modified
            state.sample = newest_group(self._rollouts) or {}
        if (modified := _modification_time(self._rows)) != self._declared:
            self._declared = modified
            state.declared = read_rows(self._rows) or installed_rows()
        unseen = [record for record in metrics if record["time"] > self._newest_metrics]
        self._newest_metrics = max((record["time"] for record in unseen), default=self._newest_metrics)
        for record in [*events[-1:], *metrics[-1:]]:
            self._newest = max(self._newest, record["time"])
        if not state.checkpoint_metric:
            state.checkpoint_metric, state.configured_bound, state.cuts_distribution = _from_config(self._config)
        if state.end:
            state.status = state.end.get("status", "failed")
            state.now = float(state.end["time"])
        else:
            if state.start and "pid" not in state.start:
                state.status = "running"
            elif state.start and time.monotonic() - self._checked > 2.0:
                self._checked = time.monotonic()
                state.status = "running" if driver_lives(state.start) else "died"
            state.now = self._newest if state.status == "died" else max(time.time(), self._newest)
        news = events + unseen
        news.sort(key=lambda record: float(record["time"]))
        return news

    def _read_sound(self, tail: Tail, *keys: str) -> list[Record]:
        """Read a file's new records; count damaged ones, and return the others."""
        records = tail.read()
        sound = [record for record in records if is_sound(record, keys)]
        self._unsound[tail] += len(records) - len(sound)
        self.state.damaged[tail.name] = tail.damaged + self._unsound[tail]
        return sound


def read_state(path: Path, samples: bool = False) -> RunState:
    """Return the state of a run by its files. samples: with the newest group of rollouts."""
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
    """Return checkpoint.metric, the bound on the mismatch, infinite without one, and if top_p or top_k are set."""
    import yaml

    try:
        loaded: Any = yaml.safe_load(config.read_text())
        bound = (loaded.get("health") or {}).get("max_token_mult_prob_error", "inf")
        sampling = loaded.get("generation") or {}
        cuts = float(sampling.get("top_p", 1)) < 1 or int(sampling.get("top_k", 0)) > 0
        return str(loaded["checkpoint"]["metric"]), float(bound), cuts
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return "", float("inf"), False
