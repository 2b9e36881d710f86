"""Charts of a report as PNG pictures, one picture for each section, without a browser."""

from collections.abc import Iterator, Sequence

from rlctl.dashboard.report import vega
from rlctl.dashboard.report.metric_charts import MetricChart, charts_of
from rlctl.dashboard.report.source import ReportedRun

# Widths in pixels of a chart, of a stacked chart, and of a row of charts.
_WIDTH = 380
_WIDE = 760
_ROW = 1140


def pictures(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a section, bytes of its PNG)."""
    names = [run.name for run in runs]
    charts = charts_of([run.state for run in runs])
    for section in dict.fromkeys(chart.section for chart in charts):
        specs = [chart_spec(chart, names) for chart in charts if chart.section == section]
        yield section.lower().replace(" ", "-"), vega.picture(_rows(specs), vega.LIGHT)


def _rows(specs: Sequence[vega.Spec]) -> list[list[vega.Spec]]:
    """Return the charts in rows of at most `_ROW` pixels' width."""
    rows: list[list[vega.Spec]] = []
    for spec in specs:
        if not rows or sum(row_spec["width"] for row_spec in rows[-1]) + spec["width"] > _ROW:
            rows.append([])
        rows[-1].append(spec)
    return rows


def chart_spec(chart: MetricChart, names: Sequence[str]) -> vega.Spec:
    """Return a chart's specification with values, width and title. On the HTML page these are outside of it."""
    run = f", {names[chart.series[0].run]}" if chart.stacked and len(names) > 1 else ""
    metrics = ", ".join(chart.meanings) if len(chart.meanings) < 3 else ""
    return {
        **vega.spec_of(chart, names, hover=False),
        "title": {"text": f"{chart.title}{run}", "subtitle": metrics},
        "width": _WIDE if chart.stacked else _WIDTH,
        "data": {"values": vega.rows_of(chart, names)},
    }
