"""Vega-Lite specifications of a report's charts, and their drawing by the package vl-convert.

The package contains Vega, Vega-Lite and Vega-Embed as one script, which is put into the page. It also draws pictures
without a browser. It is imported only when a report is written.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from rlctl.dashboard.report.metric_charts import MetricChart, stack_sums

# Version of Vega-Lite; the package contains several.
VERSION = "6.4"
# Least number of points of a series that is smoothed if it is noisy.
_SMOOTHED_FROM = 40
# The smoothed line is the mean over neighbours: on each side 1/40 of the number of points.
_NEIGHBOURS = 40
# A series is noisy if the sum of its ups and downs is more than this multiple of its range.
_NOISY = 5

Spec = dict[str, Any]
_NUMBER = "abs(datum.value) >= 1e4 ? format(datum.value, '~s') : format(datum.value, '.7~g')"
_LABELS = {"share": "format(100 * datum.value, '~g') + '%'", "seconds": f"({_NUMBER}) + ' s'", "number": _NUMBER}

LIGHT: Spec = {
    "background": "#ffffff",
    "text": "#4b5563",
    "grid": "#e5e7eb",
    "palette": [
        "#2563eb",
        "#e07b00",
        "#0a8f5b",
        "#c026a3",
        "#c81e1e",
        "#0891b2",
        "#8a6a2f",
        "#64748b",
        "#7c3aed",
        "#4d7c0f",
    ],
}
DARK: Spec = {
    "background": "#161b24",
    "text": "#9aa4b4",
    "grid": "#2b3340",
    "palette": [
        "#6ea8fe",
        "#ffb454",
        "#4fd1a1",
        "#f08cd8",
        "#ff7b7b",
        "#5cd0e6",
        "#d3b06f",
        "#a5b1c2",
        "#b79bff",
        "#a3d15c",
    ],
}


def is_installed() -> bool:
    return find_spec("vl_convert") is not None


def script() -> str:
    """Return the JavaScript that defines `vegaEmbed`, `vegaLite` and `vega`. The first call takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION).replace(
        "</script", "<\\/script"
    )


def picture(rows: Sequence[Sequence[Spec]], theme: Spec) -> bytes:
    """Return a PNG of charts in rows, at twice the charts' size in pixels."""
    import vl_convert

    apart = {"scale": {"color": "independent", "strokeDash": "independent"}}
    spec = {"vconcat": [{"hconcat": list(row), "resolve": apart} for row in rows], "resolve": apart}
    return vl_convert.vegalite_to_png(spec, vl_version=VERSION, scale=2, config=config(theme))


def config(theme: Spec) -> Spec:
    """Return the part of every specification that depends on the theme."""
    return {
        "background": theme["background"],
        "font": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif",
        "view": {"stroke": None},
        "range": {"category": theme["palette"]},
        "axis": {
            "labelColor": theme["text"],
            "titleColor": theme["text"],
            "gridColor": theme["grid"],
            "domainColor": theme["grid"],
            "tickColor": theme["grid"],
        },
        "legend": {
            "labelColor": theme["text"],
            "orient": "top",
            "title": None,
            "labelLimit": 300,
            "columns": 2,
            "layout": {"top": {"direction": "vertical", "anchor": "start"}},
        },
        "title": {"color": theme["text"], "subtitleColor": theme["text"], "anchor": "start"},
        "rule": {"color": theme["text"]},
    }


def rows_of(chart: MetricChart, names: Sequence[str]) -> list[Spec]:
    """Return the values of a chart as rows of data for Vega. names: names of the runs."""
    rows = []
    for number, metric in enumerate(chart.series):
        source = {"metric": metric.name, "run": names[metric.run], "key": f"s{number}"}
        rows += [{"step": step, "value": value, **source} for step, value in zip(metric.steps, metric.values)]
    return rows


def spec_of(chart: MetricChart, names: Sequence[str], hover: bool = True) -> Spec:
    """Return the specification of a chart, without its values and its width. names: names of the runs."""
    drawn_runs = [names[run] for run in dict.fromkeys(metric.run for metric in chart.series)]
    metrics = list(dict.fromkeys(metric.name for metric in chart.series))
    y: Spec = {
        "field": "value",
        "type": "quantitative",
        "title": None,
        "axis": {"labelExpr": _LABELS[chart.unit], "tickCount": 5},
        "scale": {"zero": chart.unit == "share"},
    }
    by_run = len(names) > 1 and not chart.stacked
    colour: Spec = {"field": "run" if by_run else "metric", "type": "nominal", "sort": metrics, "legend": _STROKES}
    if by_run:
        # A run has the same colour in all charts. The legend names it even if it is the only run with the metric.
        colour |= {"sort": list(names), "scale": {"domain": list(names)}, "legend": {**_STROKES, "values": drawn_runs}}
    elif len(metrics) == 1 and not chart.stacked:
        colour["legend"] = None
    encoding: Spec = {"y": y, "color": colour}
    if chart.stacked:
        y |= {"stack": "zero", "scale": {"domainMax": chart.top}}
        colour |= {"sort": list(chart.names), "scale": {"domain": list(chart.names)}, "legend": {"columns": 5}}
        layers: list[Spec] = [{"mark": {"type": "area", "clip": True}, "encoding": encoding}]
    else:
        if by_run and len(metrics) > 1:
            encoding["strokeDash"] = {"field": "metric", "type": "nominal", "sort": metrics, "legend": _DASHES}
        layers = _line_layers(chart, encoding)
    if hover:
        layers[0]["params"] = [_WINDOW]
        layers.append(_HOVER)
    x: Spec = {"field": "step", "type": "quantitative", "title": None, "scale": {"zero": False, "nice": False}}
    x["axis"] = {"format": "~d", "tickMinStep": 1, "tickCount": 6, "grid": False}
    return {"height": 190, "encoding": {"x": x}, "layer": layers}


def _line_layers(chart: MetricChart, encoding: Spec) -> list[Spec]:
    """Return the layers of a line chart.

    A noisy series is a faint line and its mean over neighbours. A short series is a line with points. Other series are
    plain lines.
    """
    kinds: dict[str, list[str]] = {"short": [], "smooth": [], "noisy": []}
    for number, metric in enumerate(chart.series):
        kinds[_kind(metric.values)].append(f"s{number}")
    line: Spec = {"type": "line", "clip": True, "strokeWidth": 1.6}
    layers: list[Spec] = []
    if noisy := kinds["noisy"]:
        only_noisy = _series_filter(noisy)
        reach = max(len(metric.values) for metric in chart.series) // _NEIGHBOURS
        window = {
            "window": [{"op": "mean", "field": "value", "as": "smooth"}],
            "sort": [{"field": "step"}],
            "frame": [-reach, reach],
            "groupby": ["key"],
        }
        mean = {**encoding, "y": {**encoding["y"], "field": "smooth"}}
        faint = {**line, "opacity": 0.28, "strokeWidth": 1}
        layers.append({"transform": [only_noisy], "mark": faint, "encoding": encoding})
        layers.append({"transform": [only_noisy, window], "mark": line, "encoding": mean})
    if lines := kinds["smooth"] + kinds["short"]:
        layers.append({"transform": [_series_filter(lines)], "mark": line, "encoding": encoding})
    if kinds["short"]:
        # The points are a separate layer, because points of a line would remove the dashes from the legend.
        point = {"type": "point", "filled": True, "size": 30, "clip": True, "opacity": 1}
        solid = {name: channel for name, channel in encoding.items() if name != "strokeDash"}
        layers.append({"transform": [_series_filter(kinds["short"])], "mark": point, "encoding": solid})
    if chart.bound is not None:
        rule = {"type": "rule", "strokeDash": [4, 4], "opacity": 0.7, "clip": True}
        bound = {"y": {"field": "bound", "type": "quantitative"}}
        layers.append({"data": {"values": [{"bound": chart.bound}]}, "mark": rule, "encoding": bound})
    return layers


def _series_filter(keys: Sequence[str]) -> Spec:
    return {"filter": {"field": "key", "oneOf": list(keys)}}


def _kind(values: Sequence[float]) -> str:
    """Return the kind of a series: `short`, `smooth` or `noisy`. It decides how the series is drawn."""
    if len(values) < _SMOOTHED_FROM:
        return "short"
    way = sum(abs(later - earlier) for earlier, later in pairwise(values))
    return "noisy" if way > _NOISY * (max(values) - min(values)) else "smooth"


def steps_above(chart: MetricChart) -> list[tuple[int, float]]:
    """Return (step, sum) of the steps whose sums are above the end of a stacked chart's axis."""
    return [(step, value) for step, value in stack_sums(chart.series).items() if value > chart.top]


def health_spec(names: Sequence[str], rows: int) -> Spec:
    """Return the specification of the events over the steps: a row for each kind, a mark for each event.

    names: names of the runs. rows: number of kinds.
    """
    colour: Spec = {"field": "run", "type": "nominal", "sort": list(names)}
    if len(names) == 1:
        colour["legend"] = None
    x = {
        "field": "step",
        "type": "quantitative",
        "title": None,
        "scale": {"nice": False},
        "axis": {"tickMinStep": 1, "tickCount": 12, "grid": False},
    }
    y = {"field": "label", "type": "nominal", "title": None, "axis": {"grid": True, "domain": False, "ticks": False}}
    return {
        "height": 26 * rows + 10,
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8, "tooltip": {"content": "data"}},
        "encoding": {"x": x, "y": y, "color": colour},
    }


_STROKES = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5}
# A grey that is visible on both backgrounds.
_DASHES = {**_STROKES, "symbolStrokeColor": "#808897"}
_NEAREST = {"type": "point", "fields": ["step"], "nearest": True, "on": "pointermove", "clear": "pointerout"}
_WINDOW: Spec = {
    "name": "window",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.altKey]"},
    "bind": "scales",
}
# A vertical line at the step under the pointer. Its data has the value of every series by key (s0, s1, ...).
_HOVER: Spec = {
    "transform": [{"pivot": "key", "value": "value", "groupby": ["step"]}],
    "mark": {"type": "rule", "tooltip": {"content": "data"}},
    "encoding": {"opacity": {"condition": {"param": "hover", "value": 0.6, "empty": False}, "value": 0}},
    "params": [{"name": "hover", "select": _NEAREST}],
}
