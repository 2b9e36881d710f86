"""The charts of a report as pictures, one a section, without a browser."""

from collections.abc import Iterator, Sequence

from rlctl.dashboard.report import vega
from rlctl.dashboard.report.metric_charts import MetricChart, charts_of
from rlctl.dashboard.report.source import ReportedRun

_COLUMNS, _WIDTH, _WIDE = 3, 380, 760


def pictures(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a section, PNG)."""
    names = [run.name for run in runs]
    charts = charts_of([run.state for run in runs])
    for section in dict.fromkeys(chart.section for chart in charts):
        specs = [_spec(chart, names) for chart in charts if chart.section == section]
        rows = [specs[start : start + _COLUMNS] for start in range(0, len(specs), _COLUMNS)]
        yield section.lower().replace(" ", "-"), vega.picture(rows, vega.LIGHT)


def _spec(chart: MetricChart, names: Sequence[str]) -> vega.Spec:
    """Return a chart with its values, its width and its title: the page has the latter outside the chart."""
    run = f", {names[chart.series[0].run]}" if chart.stacked and len(names) > 1 else ""
    metrics = ", ".join(chart.meanings) if len(chart.meanings) < 3 else ""
    return {
        **vega.spec_of(chart, names, hover=False),
        "title": {"text": f"{chart.title}{run}", "subtitle": metrics},
        "width": _WIDE if chart.stacked else _WIDTH,
        "data": {"values": vega.rows_of(chart, names)},
    }
