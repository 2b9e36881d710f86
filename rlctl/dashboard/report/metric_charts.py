"""Charts of a report: the metrics of each, its section and its form. Pure.

A metric that no row of `TABLE` names gets its own chart: an environment's among the episodes, any other in the
last section. One that is 0 in every step gets none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from rlctl.dashboard.state import RunState
from rlctl.telemetry.metrics import meaning

# A stack ends at this multiple of its 98th percentile: the first step, which compiles, may take a hundredfold.
MOST_OF_USUAL = 1.5

Unit = Literal["number", "share", "seconds"]
OTHERS = "Other metrics"
# Points of a series; of a longer run each is the mean over several steps.
MOST_POINTS = 800


@dataclass(frozen=True)
class MetricSeries:
    """Course of one metric of one run."""

    run: int
    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class MetricChart:
    """Metrics on one pair of axes."""

    section: str
    title: str
    # Names, or patterns such as reward/*/mean.
    metrics: tuple[str, ...]
    unit: Unit = "number"
    # Areas one above the other instead of lines; a chart for each run.
    stacked: bool = False
    # A horizontal line: bound of a health check, and its source in words.
    bound: float | None = None
    bound_source: str = ""
    series: list[MetricSeries] = field(default_factory=list)
    # For a stacked chart: names in the same chart of any run, and the end of its axis, so that runs can be compared.
    names: tuple[str, ...] = ()
    top: float = 0.0

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.metrics)

    @property
    def meanings(self) -> dict[str, str]:
        """Return the meaning of each metric of the chart by its name."""
        return {name: meaning(name) for name in dict.fromkeys(each.name for each in self.series)}


_LEARNING, _TIME, _SPEED, _AGES = "Learning", "Step time", "Throughput and idle", "Ages"
_AGENTS, _MISMATCH, _TOKENS, _REFIT = "Episodes and tools", "Mismatch", "Groups and tokens", "Weight updates"
TABLE = (
    MetricChart(_LEARNING, "Accuracy", ("reward/accuracy", "validation/accuracy", "validation/pass_at_k"), "share"),
    MetricChart(_LEARNING, "Reward", ("reward/mean", "validation/reward")),
    MetricChart(_LEARNING, "Rewards by name", ("reward/*/mean",)),
    MetricChart(_LEARNING, "Spread of rewards", ("reward/std",)),
    MetricChart(_LEARNING, "Loss", ("loss/nll", "loss/policy", "validation/loss")),
    MetricChart(_LEARNING, "KL to the reference", ("loss/kl",)),
    MetricChart(_LEARNING, "Entropy", ("loss/entropy",)),
    MetricChart(_LEARNING, "Response length", ("length/mean", "length/p90", "length/max", "validation/length")),
    MetricChart(_LEARNING, "Truncated", ("length/truncated",), "share"),
    MetricChart(_LEARNING, "Nothing to learn", ("groups/uniform", "advantage/zero"), "share"),
    MetricChart(_LEARNING, "Gradient norm", ("train/grad_norm",)),
    MetricChart(_LEARNING, "Learning rate", ("train/lr",)),
    MetricChart(_LEARNING, "Clipped tokens", ("ratio/clipped_low", "ratio/clipped_high"), "share"),
    MetricChart(_LEARNING, "Policy ratio", ("ratio/mean", "ratio/max")),
    MetricChart(_LEARNING, "Advantages", ("advantage/mean", "advantage/std")),
    MetricChart(_LEARNING, "Failed rewards", ("reward/failed", "reward/*/failed", "validation/failed_rewards")),
    MetricChart(_LEARNING, "Share of failed rewards", ("reward/failed_share",), "share"),
    MetricChart(_AGENTS, "Turns of an episode", ("environment/turns", "validation/turns")),
    MetricChart(_AGENTS, "Tool calls of an episode", ("environment/tool_calls",)),
    MetricChart(_AGENTS, "Tool calls that failed", ("environment/tool_errors", "environment/tool_raised"), "share"),
    MetricChart(_AGENTS, "Endings of episodes", ("environment/endings/*",), "share"),
    MetricChart(_AGENTS, "Reward by turns", ("reward/turns_*",)),
    MetricChart(
        _AGENTS, "Environment failures", ("environment/failed", "environment/retries", "validation/failed_episodes")
    ),
    MetricChart(_AGENTS, "Waits for the environment", ("environment/seconds",), "seconds"),
    MetricChart(_AGENTS, "Rows of an episode", ("environment/rows",)),
    MetricChart(_TIME, "Validation", ("time/validation",), "seconds"),
    MetricChart(_TIME, "Phases of a step", ("time/*",), "seconds", stacked=True),
    MetricChart(_SPEED, "Throughput, tokens/s/device", ("throughput/effective", "throughput/training")),
    MetricChart(_SPEED, "Generation, tokens/s/device", ("throughput/generation",)),
    MetricChart(_SPEED, "An engine while it samples, tokens/s", ("engines/rate_*",)),
    MetricChart(_SPEED, "Idle", ("idle/*", "engines/idle_most"), "share"),
    MetricChart(_SPEED, "Devices in use", ("device/utilization", "throughput/mfu"), "share"),
    MetricChart(_SPEED, "Engine's batch", ("generator/sequences",)),
    MetricChart(_SPEED, "Step of an engine", ("generator/decode_step",), "seconds"),
    MetricChart(_SPEED, "Memory, GiB", ("memory/*",)),
    MetricChart(_AGES, "Trained groups by age", ("age/groups_*",), stacked=True),
    MetricChart(_AGES, "Groups on their way, by age", ("buffer/age_*",), stacked=True),
    MetricChart(_AGES, "Age, steps", ("age/mean", "age/max", "age/token_mean")),
    MetricChart(_AGES, "Mixed versions", ("age/mixed",), "share"),
    MetricChart(_AGES, "Groups kept on their way", ("buffer/target",)),
    MetricChart(_MISMATCH, "Mismatch", ("mismatch/token_mult_prob_error", "mismatch/parity")),
    MetricChart(_MISMATCH, "Mismatch by age", ("mismatch/age_*",)),
    MetricChart(_MISMATCH, "KL of generator and trainer", ("mismatch/kl",)),
    MetricChart(_MISMATCH, "Importance weights", ("importance/*",)),
    MetricChart(_TOKENS, "Tokens of a step", ("tokens/prompt", "tokens/generated", "tokens/trained", "tokens/sampled")),
    MetricChart(
        _TOKENS, "Groups of a step", ("groups/trained", "groups/missing", "groups/filtered", "groups/replaced")
    ),
    MetricChart(_TOKENS, "Groups put off", ("groups/surplus",)),
    MetricChart(_TOKENS, "Tokens not trained", ("tokens/filtered", "tokens/surplus")),
    MetricChart(_TOKENS, "Wasted tokens", ("tokens/wasted",), "share"),
    MetricChart(_TOKENS, "Rollouts left out", ("rollouts/*",)),
    MetricChart(
        _REFIT, "Weight update", ("refit/seconds", "refit/rest", "refit/wake", "refit/pause", "refit/stall"), "seconds"
    ),
    MetricChart(_REFIT, "Parts of the weight update", ("refit/pack", "refit/wire", "refit/load"), "seconds"),
    MetricChart(_REFIT, "Bandwidth, GB/s", ("refit/gb_per_s",)),
    MetricChart(_REFIT, "Offloading, seconds", ("offload/seconds",), "seconds"),
    MetricChart(_REFIT, "Offloaded, GB", ("offload/to_host_gb", "offload/to_device_gb")),
)
# Counters and sums that another chart shows.
_LEFT_OUT = (
    "version",
    "time/step",
    "validation/prompts",
    "validation/answers",
    "validation/samples",
    "age/share_*",
    "step",
    "time",
)
# The bound on the mismatch is drawn once the metric has come this share of the way from 1 to the bound. Before, it
# would flatten the curve.
NEAR = 0.2


def charts_of(states: Sequence[RunState]) -> list[MetricChart]:
    """Return the charts that have something to draw, in the order of the table; then those of metrics not in it."""
    names = sorted({name for state in states for name in _drawn(state)})
    rows = list(TABLE)
    for name in names:
        if not any(row.matches(name) for row in TABLE):
            rows.append(MetricChart(_AGENTS if name.startswith("environment/") else OTHERS, name, (name,)))
    # A section's charts are together, in the order of the table.
    order = {section: place for place, section in enumerate(dict.fromkeys(row.section for row in [*TABLE, *rows]))}
    rows.sort(key=lambda row: order[row.section])
    charts: list[MetricChart] = []
    taken: set[str] = set()
    for row in rows:
        # In the order of the row, those of a pattern by name.
        mine = [name for pattern in row.metrics for name in names if fnmatchcase(name, pattern) and name not in taken]
        taken |= set(mine)
        series = [each for name in dict.fromkeys(mine) for each in _courses(states, name)]
        if row.stacked:
            charts += _stacks(row, series)
        elif series:
            bound, source = _bound(states, series)
            charts.append(replace(row, series=series, bound=bound, bound_source=source))
    return charts


def zeros(states: Sequence[RunState]) -> list[str]:
    """Return the metrics that were recorded and are 0 in every step of every run."""
    drawn = {name for state in states for name in _drawn(state)}
    return sorted({name for state in states for name in _recorded(state)} - drawn)


def _recorded(state: RunState) -> Iterator[str]:
    for history in (state.steps, state.validations):
        for name in history.names:
            if "/" in name and name not in _LEFT_OUT and not any(fnmatchcase(name, each) for each in _LEFT_OUT):
                yield name


def _drawn(state: RunState) -> Iterator[str]:
    yield from (name for name in _recorded(state) if any(_points(state, name)[1]))


def _points(state: RunState, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric. Seconds of a validation are in its record, all others in a step's."""
    points = state.series(name) or state.validations.series(name)
    sound = [(step, value) for step, value in points if abs(value) < float("inf")]
    return [step for step, _ in sound], [value for _, value in sound]


def _courses(states: Sequence[RunState], name: str) -> Iterator[MetricSeries]:
    for run, state in enumerate(states):
        steps, values = thinned(*_points(state, name))
        if steps:
            yield MetricSeries(run, name, steps, values)


def thinned(steps: list[int], values: list[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points: means over successive points, each at its last step."""
    size = -(-len(steps) // most)
    if size <= 1:
        return steps, values
    starts = range(0, len(steps), size)
    means = [sum(part) / len(part) for part in (values[start : start + size] for start in starts)]
    return [steps[min(start + size, len(steps)) - 1] for start in starts], means


def stack_sums(series: Sequence[MetricSeries]) -> dict[int, float]:
    """Return step -> sum over the series."""
    sums: dict[int, float] = {}
    for each in series:
        for step, value in zip(each.steps, each.values):
            sums[step] = sums.get(step, 0.0) + value
    return sums


def _stacks(row: MetricChart, series: Sequence[MetricSeries]) -> list[MetricChart]:
    """Return a stacked chart for each run, with the same colours and axis."""
    by_run = [_filled([each for each in series if each.run == run]) for run in sorted({each.run for each in series})]
    names = tuple(dict.fromkeys(each.name for each in series))
    top = max((_top(filled) for filled in by_run), default=1.0)
    return [replace(row, series=filled, names=names, top=top) for filled in by_run]


def _top(series: Sequence[MetricSeries]) -> float:
    """Return the end of the axis of a stack: above nearly every step, and not far above."""
    ordered = sorted(stack_sums(series).values())
    usual = ordered[min(len(ordered) - 1, len(ordered) * 98 // 100)]
    return min(ordered[-1], MOST_OF_USUAL * usual) or 1.0


def _filled(series: Sequence[MetricSeries]) -> list[MetricSeries]:
    """Return the series with a value at every step: 0 where a metric was not recorded, as of a phase that was not."""
    steps = sorted({step for each in series for step in each.steps})
    known = [(each, dict(zip(each.steps, each.values))) for each in series]
    return [replace(each, steps=steps, values=[values.get(step, 0.0) for step in steps]) for each, values in known]


def _bound(states: Sequence[RunState], series: Sequence[MetricSeries]) -> tuple[float | None, str]:
    """Return the smallest bound on the mismatch that a run came near, and its source; None if none did."""
    near = [
        (bound, states[each.run].bound_source)
        for each in series
        if each.name == states[each.run].judged_mismatch
        and max(each.values) - 1 > NEAR * ((bound := states[each.run].mismatch_bound) - 1)
    ]
    return min(near, default=(None, ""))
