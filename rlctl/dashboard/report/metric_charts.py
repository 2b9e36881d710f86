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
        return {metric.name: metric.meaning for metric in self.series}


# The bound on the mismatch is drawn once the metric has come this share of the way from 1 to the bound. Before, it
# would flatten the curve.
NEAR = 0.2


def charts_of(states: Sequence[RunState]) -> list[MetricChart]:
    """Return the charts that have something to draw: a section's together, in the order of their places."""
    # (section, title) -> names with their rows.
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
    """Return the chart of metrics of one title; several, one for each run, if their areas are stacked."""
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
    """Return the row that draws a metric: the first run's row with a chart, else a row without a meaning."""
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
    """Return steps and values of a metric. Seconds of a validation are in its record, all others in a step's."""
    points = state.series(name) or state.validations.series(name)
    sound = [(step, value) for step, value in points if abs(value) < float("inf")]
    return [step for step, _ in sound], [value for _, value in sound]


def _series_of_runs(states: Sequence[RunState], name: str, meaning: str) -> Iterator[MetricSeries]:
    """Yield the course of a metric in each run that recorded it."""
    for run, state in enumerate(states):
        steps, values = _points(state, name)
        steps, values = thin_points(steps, values)
        if steps:
            yield MetricSeries(run=run, name=name, steps=steps, values=values, meaning=meaning)


def thin_points(steps: list[int], values: list[float], limit: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `limit` points: means over successive points, each at its last step."""
    size = -(-len(steps) // limit)
    if size <= 1:
        return steps, values
    starts = range(0, len(steps), size)
    means = [sum(part) / len(part) for part in (values[start : start + size] for start in starts)]
    return [steps[min(start + size, len(steps)) - 1] for start in starts], means


def stack_sums(series: Sequence[MetricSeries]) -> dict[int, float]:
    """Return step -> sum over the series."""
    sums: dict[int, float] = {}
    for metric in series:
        for step, value in zip(metric.steps, metric.values):
            sums[step] = sums.get(step, 0.0) + value
    return sums


def _stacks(chart: MetricChart, series: Sequence[MetricSeries]) -> list[MetricChart]:
    """Return a stacked chart for each run, with the same colours and axis."""
    series_by_run: dict[int, list[MetricSeries]] = {}
    for metric in series:
        series_by_run.setdefault(metric.run, []).append(metric)
    stacks = [_fill_steps(series_by_run[run]) for run in sorted(series_by_run)]
    names = tuple(dict.fromkeys(metric.name for metric in series))
    top = max(map(_axis_top, stacks), default=1.0)
    return [replace(chart, series=stack, names=names, top=top) for stack in stacks]


def _axis_top(series: Sequence[MetricSeries]) -> float:
    """Return the end of the axis of a stack: above nearly every step, and not far above."""
    sums = sorted(stack_sums(series).values())
    percentile_98 = sums[min(len(sums) - 1, len(sums) * 98 // 100)]
    return min(sums[-1], MOST_OF_USUAL * percentile_98) or 1.0


def _fill_steps(series: Sequence[MetricSeries]) -> list[MetricSeries]:
    """Return the series with a value at every step: 0 where a metric was not recorded, as of a phase that was not."""
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
    """Return the smallest bound on the mismatch that a run came near, and its source; None if none did."""
    near_bounds = []
    for metric in series:
        state = states[metric.run]
        bound = state.mismatch_bound
        if metric.name == state.judged_mismatch and max(metric.values) - 1 > NEAR * (bound - 1):
            near_bounds.append((bound, state.bound_source))
    return min(near_bounds, default=(None, ""))
