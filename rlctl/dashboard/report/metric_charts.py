"""Charts of a report: the metrics of each chart, its section and its form. Pure.

The declaration of a metric names its chart. A metric without a declaration gets its own chart, in the section of
episodes for an environment's metric, else in the last section. A metric that is 0 in every step gets no chart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlctl.dashboard.state import RunState
from rlctl.telemetry.metrics import EPISODES, OTHERS, SECTIONS, Metric, ReportChart

# The axis of a stacked chart ends at this multiple of the 98th percentile, because the first step, which compiles, may
# take a hundred times as long as others.
MOST_OF_USUAL = 1.5

Axis = Literal["number", "share", "seconds"]
# Most points of a series. In a longer run each point is the mean over several steps.
MOST_POINTS = 800


@dataclass(frozen=True)
class MetricSeries:
    """Values of one metric over the steps of one run."""

    # Index of the run in the report.
    run: int
    name: str
    steps: list[int]
    values: list[float]
    # Meaning of the metric in words; empty for a metric without a declaration.
    meaning: str = ""


@dataclass(frozen=True)
class MetricChart:
    """Metrics on one pair of axes."""

    section: str
    title: str
    unit: Axis = "number"
    # True for stacked areas instead of lines, with one chart for each run.
    stacked: bool = False
    # Bound of a health check, drawn as a horizontal line; None for no line.
    bound: float | None = None
    # Origin of the bound in words.
    bound_source: str = ""
    series: list[MetricSeries] = field(default_factory=list)
    # Names of the metrics of all runs, for a stacked chart. They make the colours equal in the runs' charts.
    names: tuple[str, ...] = ()
    # End of the axis of a stacked chart, equal in the runs' charts.
    top: float = 0.0

    @property
    def meanings(self) -> dict[str, str]:
        """Meaning of each metric of the chart, by the metric's name."""
        return {metric.name: metric.meaning for metric in self.series}


# The bound on the mismatch is drawn if the metric has exceeded this share of the distance from 1 to the bound. A bound
# far above the curve would flatten the curve.
NEAR = 0.2


def charts_of(states: Sequence[RunState]) -> list[MetricChart]:
    """Return the charts that are not empty, by section, in the declared order."""
    # (section, title) -> (name, declaration) of each metric.
    metrics_of_chart: dict[tuple[str, str], list[tuple[str, Metric]]] = {}
    for name in sorted(_drawn_names(states)):
        row = _row_of(states, name)
        assert row.chart
        metrics_of_chart.setdefault((row.chart.section, row.chart.title or name), []).append((name, row))
    for metrics in metrics_of_chart.values():
        metrics.sort(key=_place)

    def chart_place(section_and_title: tuple[str, str]) -> tuple[int, str, int, str]:
        section, title = section_and_title
        first_metric = metrics_of_chart[section_and_title][0]
        return _section_place(section), section, _place(first_metric)[0], title

    charts = []
    for section, title in sorted(metrics_of_chart, key=chart_place):
        charts += _charts(states, section, title, metrics_of_chart[section, title])
    return charts


def _charts(
    states: Sequence[RunState], section: str, title: str, metrics: Sequence[tuple[str, Metric]]
) -> list[MetricChart]:
    """Return the chart of the metrics with one title, or for a stacked chart one chart for each run."""
    units = {row.unit for _, row in metrics}
    unit: Axis = "number"
    if units == {"share"}:
        unit = "share"
    elif units == {"seconds"}:
        unit = "seconds"
    series: list[MetricSeries] = []
    for name, row in metrics:
        series += _series_of_runs(states, name, row.meaning)
    declared_chart = metrics[0][1].chart
    if declared_chart and declared_chart.stacked:
        return _stacks(MetricChart(section, title, unit, stacked=True), series)
    bound, source = _bound(states, series)
    return [MetricChart(section, title, unit, series=series, bound=bound, bound_source=source)]


def _row_of(states: Sequence[RunState], name: str) -> Metric:
    """Return the declaration of a metric with a chart from the first run that has one, else a default declaration."""
    rows = (state.declared.find(name) for state in states)
    declared = next((row for row in rows if row and row.chart), None)
    section = EPISODES if name.startswith("environment/") else OTHERS
    return declared or Metric(name, "", chart=ReportChart(section))


def _place(metric: tuple[str, Metric]) -> tuple[int, str]:
    """Return the sort key of a metric within its section. The metrics of a family are in alphabetical order."""
    name, row = metric
    assert row.chart
    return row.chart.place, name


def _section_place(section: str) -> int:
    """Return the place of a section. Sections of users come before the last section."""
    if section in SECTIONS:
        return SECTIONS.index(section)
    return len(SECTIONS) + 1 if section == OTHERS else len(SECTIONS)


def zeros(states: Sequence[RunState]) -> list[str]:
    """Return the names of the recorded metrics that are 0 in every step of every run."""
    names: set[str] = set()
    for state in states:
        names.update(_recorded_names(state))
    return sorted(names - _drawn_names(states))


def _recorded_names(state: RunState) -> Iterator[str]:
    """Yield the name of each recorded metric, except metrics that are declared without a chart."""
    for history in (state.steps, state.validations):
        for name in history.names:
            row = state.declared.find(name)
            if "/" in name and not (row and row.chart is None):
                yield name


def _drawn_names(states: Sequence[RunState]) -> set[str]:
    """Return the name of each metric that is not 0 in some step of some run."""
    names: set[str] = set()
    for state in states:
        names.update(name for name in _recorded_names(state) if any(_points(state, name)[1]))
    return names


def _points(state: RunState, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric, without infinite values.

    A metric that steps lack is taken from the validations, for example a validation's seconds.
    """
    points = state.series(name) or state.validations.series(name)
    sound = [(step, value) for step, value in points if abs(value) < float("inf")]
    return [step for step, _ in sound], [value for _, value in sound]


def _series_of_runs(states: Sequence[RunState], name: str, meaning: str) -> Iterator[MetricSeries]:
    """Yield the series of a metric in each run that recorded it."""
    for run, state in enumerate(states):
        steps, values = _points(state, name)
        steps, values = thin_points(steps, values)
        if steps:
            yield MetricSeries(run=run, name=name, steps=steps, values=values, meaning=meaning)


def thin_points(steps: list[int], values: list[float], limit: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `limit` points: means over successive points, each at the last of their steps."""
    size = -(-len(steps) // limit)
    if size <= 1:
        return steps, values
    starts = range(0, len(steps), size)
    means = [sum(part) / len(part) for part in (values[start : start + size] for start in starts)]
    return [steps[min(start + size, len(steps)) - 1] for start in starts], means


def stack_sums(series: Sequence[MetricSeries]) -> dict[int, float]:
    """Return for each step the sum of the series' values."""
    sums: dict[int, float] = {}
    for metric in series:
        for step, value in zip(metric.steps, metric.values):
            sums[step] = sums.get(step, 0.0) + value
    return sums


def _stacks(chart: MetricChart, series: Sequence[MetricSeries]) -> list[MetricChart]:
    """Return a stacked chart for each run. All have the same colours and the same axis."""
    series_by_run: dict[int, list[MetricSeries]] = {}
    for metric in series:
        series_by_run.setdefault(metric.run, []).append(metric)
    stacks = [_fill_steps(series_by_run[run]) for run in sorted(series_by_run)]
    names = tuple(dict.fromkeys(metric.name for metric in series))
    top = max(map(_axis_top, stacks), default=1.0)
    return [replace(chart, series=stack, names=names, top=top) for stack in stacks]


def _axis_top(series: Sequence[MetricSeries]) -> float:
    """Return the end of a stacked chart's axis: above nearly all steps, but not stretched by a few large ones."""
    sums = sorted(stack_sums(series).values())
    percentile_98 = sums[min(len(sums) - 1, len(sums) * 98 // 100)]
    return min(sums[-1], MOST_OF_USUAL * percentile_98) or 1.0


def _fill_steps(series: Sequence[MetricSeries]) -> list[MetricSeries]:
    """Return the series with a value at every step: 0 at a step that did not record the metric."""
    all_steps: set[int] = set()
    for metric in series:
        all_steps.update(metric.steps)
    steps = sorted(all_steps)
    filled_series = []
    for metric in series:
        value_at = dict(zip(metric.steps, metric.values))
        filled_series.append(replace(metric, steps=steps, values=[value_at.get(step, 0.0) for step in steps]))
    return filled_series


def _bound(states: Sequence[RunState], series: Sequence[MetricSeries]) -> tuple[float | None, str]:
    """Return the smallest bound on the mismatch that a run came near, and its origin; None if no run did."""
    near_bounds = []
    for metric in series:
        state = states[metric.run]
        bound = state.mismatch_bound
        if metric.name == state.judged_mismatch and max(metric.values) - 1 > NEAR * (bound - 1):
            near_bounds.append((bound, state.bound_source))
    return min(near_bounds, default=(None, ""))
