"""Report of runs as one HTML page that loads no other file: texts, tables, and the data for `report.js`."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlctl.dashboard.formats import span
from rlctl.dashboard.report import vega
from rlctl.dashboard.report.metric_charts import MetricChart, charts_of, zeros
from rlctl.dashboard.report.source import (
    HEALTH,
    MOST_EVENTS,
    ConfigValue,
    ReportedRun,
    meaning_of_key,
    meanings_of_keys,
)
from rlctl.dashboard.summary import facts_of
from rlctl.telemetry.metrics import OTHERS

_HERE = Path(__file__).parent
# The page may load and send nothing. `unsafe-eval`, because Vega compiles its expressions.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
_ABSENT = ConfigValue("–", "")
_HEALTH = "Health and events"


def page(runs: Sequence[ReportedRun], written: str) -> str:
    """Return the report's HTML. written: text for the reader on when it was written."""
    charts = charts_of([run.state for run in runs])
    names = [run.name for run in runs]
    title = " · ".join(names)
    sections = list(dict.fromkeys(chart.section for chart in charts))
    parts = [_section(section, _grid(charts, section, names)) for section in sections if section != OTHERS]
    if len(runs) > 1:
        parts.append(_differences(runs))
    parts.append(_section(_HEALTH, _health_grid(runs) + _events(runs)))
    if any(any(run.samples.values()) for run in runs):
        parts.append(_section("Samples", '<div id="samples"></div>'))
    parts.append(_section(OTHERS, _grid(charts, OTHERS, names) + _zeros(runs)))
    parts.append(_config(runs))
    script_data = {
        "themes": {"light": vega.config(vega.LIGHT), "dark": vega.config(vega.DARK)},
        "charts": [_chart_data(chart, names) for chart in charts] + _health_data(runs),
        "samples": [{"name": run.name, "groups": run.samples} for run in runs],
    }
    text = _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style=(_HERE / "report.css").read_text(),
        heads="".join(_head(run) for run in runs),
        body="".join(parts),
        written=escape(written),
        data=json.dumps(script_data, separators=(",", ":")).replace("<", "\\u003c"),
        library=vega.script(),
        script=(_HERE / "report.js").read_text(),
    )
    # Python reads a folder's name that is not UTF-8 with lone surrogates, which cannot be written to a file.
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _chart_data(chart: MetricChart, names: Sequence[str]) -> dict[str, Any]:
    """Return a chart's specification, and its series for the values that the page shows on hover."""
    has_several_runs = len({metric.run for metric in chart.series}) > 1
    series = []
    for metric in chart.series:
        run = names[metric.run]
        series.append(
            {
                "metric": metric.name,
                "run": run,
                "label": f"{run} · {metric.name}" if has_several_runs else metric.name,
                "meaning": metric.meaning,
                "steps": metric.steps,
                "values": [float(f"{value:.6g}") for value in metric.values],
            }
        )
    return {"spec": vega.spec_of(chart, names), "unit": chart.unit, "series": series}


def _health_data(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the chart of health in a list; an empty list if there is nothing to show."""
    rows = []
    for run in runs:
        for event in run.events:
            if event.kind in HEALTH:
                row = {"step": event.step, "label": event.label, "text": event.text, "run": run.name}
                rows.append(row | {"kind": event.kind})
    # A chart that has only the ends of runs says nothing of their health.
    if {row["kind"] for row in rows} <= {"run_ended"}:
        return []
    labels = {row["label"] for row in rows}
    return [{"spec": vega.health_spec([run.name for run in runs], len(labels)), "rows": rows}]


def _section(title: str, content: str) -> str:
    return f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _grid(charts: Sequence[MetricChart], section: str, names: Sequence[str]) -> str:
    """Return the HTML frames of a section's charts. `report.js` draws chart number N into the frame `data-chart` N."""
    cards = "".join(_card(number, chart, names) for number, chart in enumerate(charts) if chart.section == section)
    return f'<div class="grid">{cards}</div>' if cards else ""


def _card(number: int, chart: MetricChart, runs: Sequence[str]) -> str:
    """Return the HTML frame of a chart, with its title, its metrics and its notes."""
    names = list(chart.meanings)
    listed = names if len(names) <= 4 else [*names[:3], f"and {len(names) - 3} more"]
    title = f"{chart.title}: {runs[chart.series[0].run]}" if chart.stacked and len(runs) > 1 else chart.title
    meanings = "\n".join(f"{name}: {text}" for name, text in chart.meanings.items() if text)
    wide = " wide" if chart.stacked else ""
    return (
        f'<figure class="card{wide}"><figcaption title="{escape(meanings)}"><b>{escape(title)}</b> '
        f'<span class="names">{escape(", ".join(listed))}</span></figcaption>'
        f'<div class="chart" data-chart="{number}"></div>{_notes(chart)}</figure>'
    )


def _notes(chart: MetricChart) -> str:
    """Return the notes below a chart: its dashed bound, and the steps that are cut off."""
    notes = []
    if chart.bound is not None:
        notes.append(f"dashed: {chart.bound:.4g}, {chart.bound_source}")
    if chart.stacked and (cut_steps := vega.steps_above(chart)):
        listed = ", ".join(f"{step} ({value:.3g})" for step, value in cut_steps[:3])
        if len(cut_steps) > 3:
            listed += " and others"
        notes.append(f"cut at the top: step {listed}")
    return "".join(f"<p class='note'>{escape(note)}</p>" for note in notes)


def _head(run: ReportedRun) -> str:
    """Return a run's heading: name, status, model, remarks and results."""
    state = run.state
    facts = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in facts_of(state))
    reason = f": {escape(str(state.end['reason']))}" if state.end.get("reason") else ""
    remarks = "".join(f"<p class='remark'>{escape(text)}</p>" for text in run.remarks)
    model = escape(str(state.start.get("model", "")))
    return (
        f"<article class='run'><h1>{escape(run.name)} <span class='status {escape(state.status)}'>"
        f"{escape(state.status)}</span></h1><p class='note'>{escape(state.algorithm)} · {model}{reason}</p>"
        f"{remarks}<table>{facts}</table></article>"
    )


def _differences(runs: Sequence[ReportedRun]) -> str:
    """Return a section with the keys in which the runs' configs differ.

    Keys that only runs of one kind have stand in a separate folded table.
    """
    keys = [key for key in _keys(runs) if len({run.config.get(key, _ABSENT).text for run in runs}) > 1]
    known_runs = [run for run in runs if run.config]
    if len(known_runs) < 2:
        return ""
    if not keys:
        return _section("What differs", "<p>Their configs are equal.</p>")
    # Key -> names of the runs that have the key. If the runs are of one kind, every key counts as a key of all runs.
    owners = {key: tuple(run.name for run in known_runs if key in run.config) for key in keys}
    if len({run.config.get("kind", _ABSENT).text for run in known_runs}) == 1:
        owners = dict.fromkeys(keys, tuple(run.name for run in known_runs))
    shared_keys = [key for key in keys if len(owners[key]) == len(known_runs)]
    parts = [_table(runs, shared_keys) if shared_keys else ""]
    for names in dict.fromkeys(owners.values()):
        if len(names) == len(known_runs):
            continue
        own_keys = [key for key in keys if owners[key] == names]
        sections = ", ".join(dict.fromkeys(key.partition(".")[0] for key in own_keys))
        title = f"{len(own_keys)} keys of {', '.join(names)} alone: {sections}"
        table = _table([run for run in runs if run.name in names], own_keys, id_=f"only-{len(parts)}")
        parts.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    return _section("What differs", "".join(parts))


def _config(runs: Sequence[ReportedRun]) -> str:
    """Return the section with all keys of the runs' configs."""
    if not any(run.config for run in runs):
        return ""
    legend = ""
    if any(any(value.origin for value in run.config.values()) for run in runs):
        legend = (
            "<p class='note'>Bold: no default; the place where it was written is beside it. "
            "<label><input type='checkbox' id='given'> nothing else</label></p>"
        )
    return _section("Config", legend + _table(runs, _keys(runs), id_="config"))


def _keys(runs: Iterable[ReportedRun]) -> list[str]:
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    return list(keys)


def _table(runs: Sequence[ReportedRun], keys: Iterable[str], id_: str = "differences") -> str:
    """Return a table with a row for each key and a column for each run. On hover it shows the key's meaning."""
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    meanings = meanings_of_keys()
    rows = []
    for key in keys:
        values = [run.config.get(key, _ABSENT) for run in runs]
        cells = "".join(_value(value) for value in values)
        default = "" if any(value.origin for value in values) else " class='default'"
        doc = escape(meaning_of_key(key, meanings))
        rows.append(f'<tr{default}><th title="{doc}">{escape(key)}</th>{cells}</tr>')
    return (
        f"<div class='scroll'><table id='{id_}' class='config'>"
        f"<thead><tr><th>key</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _value(value: ConfigValue) -> str:
    if not value.origin:
        return f"<td><code>{escape(value.text)}</code></td>"
    return f"<td class='own'><code>{escape(value.text)}</code><span class='origin'>{escape(value.origin)}</span></td>"


def _health_grid(runs: Sequence[ReportedRun]) -> str:
    if not _health_data(runs):
        return "<p class='note'>No warnings, no errors, no engine lost.</p>"
    # `_health_data` comes last in the list of charts, so -1 is its index.
    return '<figure class="card health"><div class="chart" data-chart="-1"></div></figure>'


def _events(runs: Sequence[ReportedRun]) -> str:
    return "".join(_events_of(run, len(runs) == 1) for run in runs if run.events)


def _events_of(run: ReportedRun, is_open: bool) -> str:
    """Return the folded table with a run's newest events."""
    newest = run.events[-MOST_EVENTS:]
    rows = "".join(
        f"<tr class='{escape(event.kind)}'><td>{span(event.at_s)}</td><td>{event.step}</td>"
        f"<td>{escape(event.text)}</td></tr>"
        for event in newest
    )
    limit = f", the newest {len(newest)}" if len(newest) < len(run.events) else ""
    return (
        f"<details{' open' if is_open else ''}><summary>{len(run.events)} events of {escape(run.name)}{limit}</summary>"
        f"<div class='scroll'><table class='events'><thead><tr><th>after</th><th>step</th><th>event</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _zeros(runs: Sequence[ReportedRun]) -> str:
    names = zeros([run.state for run in runs])
    return f"<p class='note'>0 in every step: {escape(', '.join(names))}.</p>" if names else ""


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · rlctl</title>
<style>{style}</style>
</head>
<body>
<header>
<nav id="nav"></nav>
<span class="theme"><button data-theme="">auto</button><button data-theme="light">light</button><button
data-theme="dark">dark</button></span>
</header>
<main>
<div class="runs">{heads}</div>
<p class="note">Hover a chart for its values and their meaning; drag to move along the steps, Alt + wheel to zoom,
double-click to see all. Of 40 points and more the thick line is the mean over neighbours.</p>
{body}
<p class="note">{written}</p>
</main>
<div id="tip" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""
