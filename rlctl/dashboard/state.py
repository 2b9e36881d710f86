"""What a run looks like at an instant, folded from its files; everything that shows a run reads this.

`apply_*` are pure folds over records and may see one twice (a file read anew); `RunReader` does the reading.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.dashboard.history import History
from rlctl.telemetry.jsonl import Record, Tail
from rlctl.utils.escapes import neutral
from rlctl.utils.process import lives

Status = Literal["new", "running", "done", "failed", "interrupted", "stopped", "died"]
# Events that tell where the run is rather than what happened.
SILENT = {"phase", "startup", "prompts"}
ETA_STEPS = 20


@dataclass
class RunState:
    """now: unix seconds of the view. phase: (name, step, since). startup: what -> (since, seconds or None)."""

    name: str
    now: float = 0.0
    start: Record = field(default_factory=dict)
    end: Record = field(default_factory=dict)
    startup: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    phase: tuple[str, int, float] | None = None
    steps: History = field(default_factory=History)
    validations: History = field(default_factory=History)
    checkpoints: dict[int, Record] = field(default_factory=dict)
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=100))
    # Warnings of the run's health: check -> step -> event.
    health: dict[str, dict[int, Record]] = field(default_factory=dict)
    status: Status = "new"
    checkpoint_metric: str = ""
    # health.max_token_mult_prob_error of the config.
    mismatch_bound: float = float("inf")

    @property
    def algorithm(self) -> str:
        return str(self.start.get("algorithm", "grpo"))

    @property
    def num_steps(self) -> int:
        return int(self.start.get("num_steps", 0))

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.last["step"] if self.steps else self.start.get("start_step", 0))

    @property
    def last(self) -> Record:
        """The newest step's record; empty before the first."""
        return self.steps.last

    @property
    def elapsed(self) -> float:
        """Seconds of this attempt."""
        return max(0.0, self.now - float(self.start.get("time", self.now)))

    @property
    def eta(self) -> float | None:
        """Seconds left, from the mean of the last steps' wall times; None before the first step."""
        mean = self.mean("time/step", ETA_STEPS)
        if mean is None or self.status != "running":
            return None
        return max(0.0, mean * (self.num_steps - self.step) - (self.now - float(self.last["time"])))

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """(step, value) wherever a step, or for validation/* a validation, recorded the metric."""
        return (self.validations if name.startswith("validation/") else self.steps).course(name)

    def values(self, name: str) -> Sequence[float]:
        """The values of `series`."""
        return (self.validations if name.startswith("validation/") else self.steps).values(name)

    def latest(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    def generated(self, name: str) -> float | None:
        """The newest value of a generator's metric. The last steps of an asynchronous run, for which nothing is left to
        sample, say nothing of it: once all steps are done the value is of the last one that sampled."""
        if self.status in ("new", "running") and self.step < self.num_steps:
            return self.latest(name)
        sampled = (record for record in reversed(self.steps.recent(len(self.steps))) if record.get("tokens/sampled"))
        return next((float(record[name]) for record in sampled if name in record), self.latest(name))

    def mean(self, name: str, count: int | None = None) -> float | None:
        """Mean over the last `count` records of the metric, or all."""
        values = self.values(name)[-count:] if count else self.values(name)
        return sum(values) / len(values) if values else None

    def end_with(self, event: Record) -> None:
        """Take note of an end that the run's own process knows of, should its file have had no room for it."""
        if not self.end:
            self.apply_event(event)
            self.status, self.now = event["status"], float(event["time"])

    def of_this_attempt(self) -> list[Record]:
        """The newest events that came since the attempt began."""
        begun = float(self.start.get("time", 0.0))
        return [event for event in self.events if float(event["time"]) >= begun]

    def apply_event(self, event: Record) -> None:
        kind = event.get("kind")
        if kind == "run_started":
            self._begin(event)
        elif kind == "startup":
            self._starting(str(event.get("what")), float(event["time"]), event.get("seconds"))
        elif kind == "phase":
            self.phase = (str(event.get("name")), int(event.get("step", 0)), float(event["time"]))
        elif kind == "validation_started":
            self.phase = ("validation", int(event.get("step", self.step)), float(event["time"]))
        elif kind == "checkpoint":
            self.checkpoints[int(event["step"])] = event
        elif kind == "warning" and "check" in event:
            self.health.setdefault(str(event["check"]), {})[int(event.get("step", 0))] = event
        elif kind == "submitted":
            # Its driver is yet to say that it has begun; an earlier one's end is no end of it.
            self.start, self.end, self.phase, self.startup, self.status = {}, {}, None, {}, "new"
        elif kind == "run_ended":
            self.end, self.phase = event, None
        if kind not in SILENT:
            self.events.append(event)

    def apply_metrics(self, record: Record) -> None:
        if record["step"] > self.start.get("start_step", 0) and record["time"] < self.start.get("time", 0.0):
            # A resume cuts it off once its checkpoint is loaded.
            return
        (self.validations if record.get("kind") == "validation" else self.steps).add(record)

    def _begin(self, event: Record) -> None:
        done = int(event.get("start_step", 0))
        self.start, self.end, self.phase, self.startup = event, {}, None, {}
        self.checkpoints = {step: saved for step, saved in self.checkpoints.items() if step <= done}
        self.steps.drop_after(done)
        self.validations.drop_after(done)
        self.health = {
            check: kept
            for check, said in self.health.items()
            if (kept := {step: each for step, each in said.items() if step <= done})
        }

    def _starting(self, what: str, at: float, seconds: float | None) -> None:
        if seconds is None:
            self.startup[what] = (at, None)
        else:
            since, _ = self.startup.get(what, (at - seconds, None))
            self.startup[what] = (since, float(seconds))


class RunReader:
    """Follows a run directory. `poll` brings `state` up to date and says whether anything was new."""

    def __init__(self, path: Path) -> None:
        self._events = Tail(path / "events.jsonl")
        self._metrics = Tail(path / "metrics.jsonl")
        self._config = path / "config.yaml"
        self._checked = 0.0
        self._newest = 0.0
        self.state = RunState(neutral(path.resolve().name))

    def poll(self) -> bool:
        # Events first: run_started of a resumed run clears what its metrics are about to record anew.
        events, metrics = self._events.read(), self._metrics.read()
        for event in _sound(events):
            self.state.apply_event(event)
        for record in _sound(metrics, "step"):
            self.state.apply_metrics(_numbers(record))
        for record in [*events[-1:], *metrics[-1:]]:
            self._newest = max(self._newest, float(record.get("time", 0.0)))
        if not self.state.checkpoint_metric:
            self.state.checkpoint_metric, self.state.mismatch_bound = _of_config(self._config)
        self._judge()
        return bool(events or metrics)

    def _judge(self) -> None:
        state = self.state
        if state.end:
            state.status, state.now = state.end.get("status", "failed"), float(state.end["time"])
            return
        if "pid" in state.start and time.time() - self._checked > 2.0:
            self._checked = time.time()
            start = state.start
            alive = lives(start["pid"], start.get("create_time", 0.0), start.get("host"))
            state.status = "running" if alive else "died"
        elif state.start and "pid" not in state.start:
            state.status = "running"
        state.now = self._newest if state.status == "died" else time.time()


def read_state(path: Path) -> RunState:
    """The state of a run as its files stand now."""
    reader = RunReader(path)
    reader.poll()
    return reader.state


def best_checkpoint(state: RunState) -> tuple[int, float] | None:
    """(step, value) of the best checkpoint under `checkpoint.metric` (a leading - means smaller is better)."""
    name = state.checkpoint_metric.removeprefix("-")
    sign = -1.0 if state.checkpoint_metric.startswith("-") else 1.0
    values = dict(state.series(name))
    measured = [(step, values[step]) for step in state.checkpoints if step in values]
    return max(measured, key=lambda pair: (sign * pair[1], -pair[0]), default=None)


def _sound(records: Iterable[Record], *needed: str) -> Iterable[Record]:
    return (record for record in records if all(isinstance(record.get(key), (int, float)) for key in ("time", *needed)))


def _numbers(record: Record) -> Record:
    return {name: value for name, value in record.items() if name == "kind" or isinstance(value, (int, float))}


def _of_config(config: Path) -> tuple[str, float]:
    """Return what best means, and the bound on the mismatch where there is one."""
    import yaml

    try:
        loaded: Any = yaml.safe_load(config.read_text())
        bound = (loaded.get("health") or {}).get("max_token_mult_prob_error", "inf")
        return str(loaded["checkpoint"]["metric"]), float(bound)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return "", float("inf")
