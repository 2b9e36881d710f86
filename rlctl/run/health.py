"""Checks of a run's health: they take a step's metrics and return warnings. The loop reports these and may stop.

A check warns once. It warns again only after its metric was measured within the bound. This module does no input or
output.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlctl.telemetry.metrics import LEARNING, WITH_SAMPLES, Metric, PanelRow, ReportChart, rows_where
from rlctl.training.metric_rows import GRAD_NORM

# ruff must not split the rows of this table over more lines.
# fmt: off
SKIPPED_UPDATES = Metric("train/skipped_updates",
    "updates without an optimizer step: no token to train on, or a gradient of exactly 0")
ANSWERS = Metric("validation/answers", "held-out answers, with a score or without", chart=None)
UNSCORED_ANSWERS = Metric("validation/failed_rewards", "held-out answers without a score, because a reward failed",
    chart=ReportChart(LEARNING, "Failed rewards", 162), panel=[PanelRow("val failed", 20, "bold red", failure=True)])
WEIGHT_VERSION = Metric("version", "weight version: optimizer steps in the weights", chart=None)
METRICS = (
    WEIGHT_VERSION, SKIPPED_UPDATES,
    *rows_where(WITH_SAMPLES, ANSWERS, UNSCORED_ANSWERS),
)
# fmt: on

Metrics = Mapping[str, float]
# (value compared with the bound, bound, text of the warning); None if the value is within the bound.
Finding = tuple[float, float, str] | None


class HealthStop(RuntimeError):
    """The run must not continue. A checkpoint of the last complete step was saved."""


class StopBeforeUpdateError(RuntimeError):
    """The run must stop before it trains on a step's rollouts. The resumed run makes the whole step."""


@dataclass(frozen=True)
class HealthWarning:
    """Warning that a metric has left its bound."""

    # Name of the check.
    check: str
    step: int
    value: float
    bound: float
    text: str
    # True if the run stops.
    fatal: bool


@dataclass
class HealthCheck(ABC):
    """One bound on a metric."""

    # Name of the check in warnings and the summary.
    name: str
    # Name of the metric.
    metric: str
    bound: float
    # Text of the warning, with {value}, {bound} and further fields that a subclass names.
    message: str
    # True if leaving the bound stops the run even without `health.stop`.
    fatal: bool = field(default=False, kw_only=True)

    @abstractmethod
    def find(self, metrics: Metrics) -> Finding:
        """Return the finding of one step. It is called in the order of steps, for steps that measured the metric."""

    @abstractmethod
    def state_dict(self) -> Any:
        """Return the state that a resumed run continues with."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Restore the state that `state_dict` returned."""


@dataclass
class Ceiling(HealthCheck):
    """Finds a metric that was above `bound` in at least `patience` consecutive measured steps.

    `message` may also have {steps}. NaN counts as above every bound.
    """

    patience: int = 1
    above: int = 0

    def find(self, metrics: Metrics) -> Finding:
        value = metrics[self.metric]
        self.above = 0 if value <= self.bound else self.above + 1
        if self.above < self.patience:
            return None
        return value, self.bound, self.message.format(value=value, bound=self.bound, steps=self.above)

    def state_dict(self) -> Any:
        return self.above

    def load_state_dict(self, state: Any) -> None:
        # A resumed run may try again: it stops only after `patience` further steps above the bound.
        self.above = 0 if self.fatal and state >= self.patience else state


@dataclass
class ShareCeiling(Ceiling):
    """Finds a share above `bound`: the value of `metric` divided by the value of `total`."""

    # Name of the other metric.
    total: str = field(kw_only=True)

    def find(self, metrics: Metrics) -> Finding:
        return super().find({self.metric: metrics[self.metric] / max(1.0, metrics[self.total])})


@dataclass
class Jump(HealthCheck):
    """Finds a metric above `bound` times its median over the last `window` values, once half the window is filled.

    A value of 0 is ignored, because nothing was learnt in such a step. `message` may also have {ratio} and {window}.
    """

    window: int = field(kw_only=True)
    values: deque[float] = field(default_factory=deque)

    def find(self, metrics: Metrics) -> Finding:
        value = metrics[self.metric]
        has_median = len(self.values) >= (self.window + 1) // 2
        median_before = median(self.values) if has_median else value
        if value != 0:
            self.values.append(value)
        while len(self.values) > self.window:
            self.values.popleft()
        if not has_median or value <= self.bound * median_before:
            return None
        ratio = value / median_before
        return ratio, self.bound, self.message.format(value=value, ratio=ratio, bound=self.bound, window=self.window)

    def state_dict(self) -> Any:
        return list(self.values)

    def load_state_dict(self, state: Any) -> None:
        self.values = deque(state)


@dataclass
class Decline(HealthCheck):
    """Finds a metric that is worse than its first value by more than `bound`. `message` may also have {start} and
    {lost}."""

    # 1 if smaller values are better, -1 if larger values are better.
    worse: int = field(kw_only=True)
    start: float | None = None

    def find(self, metrics: Metrics) -> Finding:
        value = metrics[self.metric]
        self.start = value if self.start is None else self.start
        lost = self.worse * (value - self.start)
        # With a tolerance, because a share of few prompts often equals the bound up to rounding.
        if lost <= self.bound + 1e-9:
            return None
        return lost, self.bound, self.message.format(value=value, start=self.start, lost=lost, bound=self.bound)

    def state_dict(self) -> Any:
        return self.start

    def load_state_dict(self, state: Any) -> None:
        self.start = state


class Health:
    """The checks of one run. stop: True if every warning stops the run."""

    def __init__(self, checks: Sequence[HealthCheck], *, stop: bool) -> None:
        self._checks = checks
        self._stop = stop
        # Names of the checks whose last value was out of bounds.
        self._ill: set[str] = set()

    def look(self, step: int, metrics: Metrics) -> list[HealthWarning]:
        """Check a step's metrics. Return a warning for each check that leaves its bound in this step."""
        warnings = []
        for check in self._checks:
            if check.metric not in metrics:
                continue
            finding = check.find(metrics)
            if finding is None:
                self._ill.discard(check.name)
            elif check.name not in self._ill:
                self._ill.add(check.name)
                value, bound, text = finding
                fatal = check.fatal or self._stop
                warnings.append(
                    HealthWarning(check=check.name, step=step, value=value, bound=bound, text=text, fatal=fatal)
                )
        return warnings

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues with."""
        return {"ill": sorted(self._ill), **{check.name: check.state_dict() for check in self._checks}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Checks without a saved state start empty."""
        # Forget which fatal checks were out of bounds, so that they can stop the resumed run again.
        fatal_names = {check.name for check in self._checks if check.fatal or self._stop}
        self._ill = set(state.get("ill", ())) - fatal_names
        for check in self._checks:
            if check.name in state:
                check.load_state_dict(state[check.name])


def gradient_jump(ratio: float, window: int) -> Jump:
    """Return the check of the gradient norm, for every kind of training. ratio, window: see `Jump`."""
    return Jump(
        "grad_norm",
        GRAD_NORM.name,
        ratio,
        "the gradient norm is {value:.4g}, {ratio:.3g} times the median of the last {window} steps, at most {bound:g} "
        "times (health.max_grad_norm_ratio)",
        window=window,
    )


def failed_validation(bound: float) -> ShareCeiling:
    """Return the check of a validation's rewards. bound: largest share of held-out answers without a score."""
    return ShareCeiling(
        "failed_validation",
        UNSCORED_ANSWERS.name,
        bound,
        "{value:.0%} of the held-out answers have no score, because a reward or an environment failed, at most "
        "{bound:.0%}: the others alone say little of these weights; logs/ has the errors",
        total=ANSWERS.name,
    )
