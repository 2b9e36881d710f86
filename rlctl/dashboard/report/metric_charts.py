"""Charts of a report: the metrics of each, its section and its form. Pure.

The rows of a run's metrics name their charts. A metric that is not declared gets its own chart: an environment's among
the episodes, any other in the last section. One that is 0 in every step gets none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlctl.dashboard.state import RunState
from rlctl.telemetry.metrics import EPISODES, OTHERS, SECTIONS, Metric, ReportChart

# A stack ends at this multiple of its 98th percentile: the first step, which compiles, may take a hundredfold.
MOST_OF_USUAL = 1.5

Axis = Literal["number", "share", "seconds"]
# Points of a series; of a longer run each is the mean over several steps.
MOST_POINTS = 800


@dataclass(frozen=True)
class MetricSeries:
    """Course of one metric of one run."""

    run: int
    name: str
    steps: list[int]
    values: list[float]
    # Empty for a metric that is not declared.
    meaning: str = ""


@dataclass(frozen=True)
class MetricChart:
    """Metrics on one pair of axes."""

    section: str
    title: str
    unit: Axis = "number"
    # Areas one above the other instead of lines; a chart for each run.
    stacked: bool = False
    # A horizontal line: bound of a health check, and its source in words.
    bound: float | None = None
    bound_source: str = ""
    series: list[MetricSeries] = field(default_factory=list)
    # For a stacked chart: names in the same chart of any run, and the end of its axis, so that runs can be compared.
    names: tuple[str, ...] = ()
    top: float = 0.0

    @property
    def meanings(self) -> dict[str, str]:
        """Return the meaning of each metric of the chart by its name."""
        return {each.name: each.meaning for each in self.series}


# The bound on the mismatch is drawn once the metric has come this share of the way from 1 to the bound. Before, it
# would flatten the curve.
NEAR = 0.2


def charts_of(states: Sequence[RunState]) -> list[MetricChart]:
    """Return the charts that have something to draw: a section's together, in the order of their places."""
    # (section, title) -> names with their rows.
    drawn: dict[tuple[str, str], list[tuple[str, Metric]]] = {}
    for name in sorted({name for state in states for name in _drawn(state)}):
        row = _row_of(states, name)
        assert row.chart
        drawn.setdefault((row.chart.section, row.chart.title or name), []).append((name, row))
    placed: list[tuple[tuple[int, str, int, str], list[MetricChart]]] = []
    for (section, title), metrics in drawn.items():
        metrics.sort(key=_place)
        place = (_section_place(section), section, _place(metrics[0])[0], title)
        placed.append((place, _charts(states, section, title, metrics)))
    return [chart for _, charts in sorted(placed, key=lambda pair: pair[0]) for chart in charts]


def _charts(
    states: Sequence[RunState], section: str, title: str, metrics: Sequence[tuple[str, Metric]]
) -> list[MetricChart]:
    """Return the chart of metrics of one title; several, one for each run, if their areas are stacked."""
    units = {row.unit for _, row in metrics}
    unit: Axis = "number"
    if units == {"share"}:
        unit = "share"
    elif units == {"seconds"}:
        unit = "seconds"
    series = [each for name, row in metrics for each in _courses(states, name, row.meaning)]
    first = metrics[0][1].chart
    if first and first.stacked:
        return _stacks(MetricChart(section, title, unit, stacked=True), series)
    bound, source = _bound(states, series)
    return [MetricChart(section, title, unit, series=series, bound=bound, bound_source=source)]


def _row_of(states: Sequence[RunState], name: str) -> Metric:
    """Return the row by which a metric is drawn: that of the first run that has one, else one without a meaning."""
    rows = (state.declared.find(name) for state in states)
    declared = next((row for row in rows if row and row.chart), None)
    section = EPISODES if name.startswith("environment/") else OTHERS
    return declared or Metric(name, "", chart=ReportChart(section))


def _place(metric: tuple[str, Metric]) -> tuple[int, str]:
    """Return the place of a metric in its section; the names of a family are in alphabetical order."""
    name, row = metric
    assert row.chart
    return row.chart.place, name


def _section_place(section: str) -> int:
    """Return the place of a section; users' own come before the last one."""
    if section in SECTIONS:
        return SECTIONS.index(section)
    return len(SECTIONS) + 1 if section == OTHERS else len(SECTIONS)


def zeros(states: Sequence[RunState]) -> list[str]:
    """Return the metrics that were recorded and are 0 in every step of every run."""
    drawn = {name for state in states for name in _drawn(state)}
    return sorted({name for state in states for name in _recorded(state)} - drawn)


def _recorded(state: RunState) -> Iterator[str]:
    for history in (state.steps, state.validations):
        for name in history.names:
            row = state.declared.find(name)
            if "/" in name and not (row and row.chart is None):
                yield name


def _drawn(state: RunState) -> Iterator[str]:
    yield from (name for name in _recorded(state) if any(_points(state, name)[1]))


def _points(state: RunState, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric. Seconds of a validation are in its record, all others in a step's."""
    points = state.series(name) or state.validations.series(name)
    sound = [(step, value) for step, value in points if abs(value) < float("inf")]
    return [step for step, _ in sound], [value for _, value in sound]


def _courses(states: Sequence[RunState], name: str, meaning: str) -> Iterator[MetricSeries]:
    for run, state in enumerate(states):
        steps, values = thinned(*_points(state, name))
        if steps:
            yield MetricSeries(run, name, steps, values, meaning)


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


def _stacks(chart: MetricChart, series: Sequence[MetricSeries]) -> list[MetricChart]:
    """Return a stacked chart for each run, with the same colours and axis."""
    by_run = [_filled([each for each in series if each.run == run]) for run in sorted({each.run for each in series})]
    names = tuple(dict.fromkeys(each.name for each in series))
    top = max((_top(filled) for filled in by_run), default=1.0)
    return [replace(chart, series=filled, names=names, top=top) for filled in by_run]


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
