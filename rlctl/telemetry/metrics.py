"""Declarations of metrics ("rows"), one for each name in metrics.jsonl, and a run's own copy of its rows.

A metric is declared once. rlctl's own metrics are declared in the folder that measures them, for example in
`grpo/metric_rows.py`; `config/plugins.py` lists these modules, and none imports torch. A user's class declares its
metrics in its attribute `metrics`. A run writes its rows into its directory. The live view and the report read them
there, so they can also show users' metrics and runs of other machines.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from rlctl.config.errors import did_you_mean
from rlctl.config.plugins import METRICS
from rlctl.utils.files import write_whole

# File in a run's directory with its rows.
METRIC_ROWS = "metric_rows.json"
# Decides how a value is shown. A share is 0 to 1. A factor is a ratio with the ideal value 1. The meaning names other
# units, for example GiB.
Unit = Literal["number", "share", "seconds", "factor"]
Algorithm = Literal["grpo", "sft"]
# Sections of a report, in order. A user's own sections follow them, and "Other metrics" is last.
LEARNING = "Learning"
EPISODES = "Episodes and tools"
STEP_TIME = "Step time"
SPEED = "Throughput and idle"
AGES = "Ages"
MISMATCH = "Mismatch"
GROUPS = "Groups and tokens"
WEIGHT_UPDATES = "Weight updates"
OTHERS = "Other metrics"
SECTIONS = (LEARNING, EPISODES, STEP_TIME, SPEED, AGES, MISMATCH, GROUPS, WEIGHT_UPDATES)
# Allowed colours of a row in the live view.
STYLES = ("cyan", "green", "magenta", "yellow", "blue", "bold red")
# Default sort key (`place`) of a chart or of a row in the live view.
LAST = 1000


@dataclass(frozen=True)
class ReportChart:
    """Chart of the report that draws a metric."""

    section: str = OTHERS
    # Metrics with the same title share a chart. Empty: the metric is alone in a chart, with its name as the title.
    title: str = ""
    # Sort key of the metric in its section, lowest first. A chart takes the lowest key of its metrics.
    place: int = LAST
    # Draw stacked areas instead of lines, in one chart for each run.
    stacked: bool = False

    def with_place(self, place: int) -> "ReportChart":
        """Return the same chart with another sort key."""
        return replace(self, place=place)


@dataclass(frozen=True)
class PanelRow:
    """Row of the live view's panel Learning that shows a metric."""

    # At most 10 letters. Empty for a family of metrics: the label is then the end of each metric's name.
    label: str
    # Sort key in the panel, lowest at the top.
    place: int = LAST
    style: str = "cyan"
    _: KW_ONLY
    # Only runs of this algorithm show the row; None: every run shows it.
    algorithm: Algorithm | None = None
    # Show the row only while the metric is above 0, and then above all other rows.
    failure: bool = False
    # Show the row only if the metric was above 0 at some step.
    used: bool = False

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            near = did_you_mean(self.style, STYLES)
            raise ValueError(f"style={self.style} of row {self.label}: must be one of {', '.join(STYLES)}{near}")


@dataclass(frozen=True)
class Condition:
    """Rule that decides, from the settled config (`preflight.settled.Settled`), if a run measures a metric."""

    # Takes the settled config; returns True if the run measures the metric.
    holds: Callable[[Any], bool]
    # End of the sentence "it is measured only ...", for example "in a GRPO run".
    where: str


IN_GRPO = Condition(lambda settled: settled.grpo is not None, "in a GRPO run")
IN_SFT = Condition(lambda settled: settled.sft is not None, "in an SFT run")
WITH_SAMPLES = Condition(
    lambda settled: settled.sampling is not None, "where answers are sampled: in a GRPO run, or by validation.recipe"
)


def grpo_where(holds: Callable[[Any], bool], where: str) -> Condition:
    """Return a condition that is met by GRPO runs for whose settled config `holds` returns True."""
    return Condition(lambda settled: settled.grpo is not None and holds(settled), where)


IN_ASYNC = grpo_where(lambda settled: settled.config.async_.enabled, "with async.enabled=true")


def ages_of_run(settled: Any) -> list[str]:
    """Return the ages (in steps) that groups and tokens of a run may have, as texts for `Metric.parts`."""
    return [str(age) for age in range(settled.config.async_.max_age + 1)]


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric, or of a family of metrics, for example "time/NAME"."""

    # Name in metrics.jsonl. A family's name has the placeholder NAME for any text, or ends with K for a whole number.
    name: str
    meaning: str
    unit: Unit = "number"
    _: KW_ONLY
    # None: the report does not draw the metric, because another chart shows the same.
    chart: ReportChart | None = ReportChart()
    panel: Sequence[PanelRow] = ()
    # How the values of a step's optimizer updates become one value: their mean, the first value, or their sum.
    over_updates: Literal["mean", "first", "sum"] = "mean"
    # None: every run measures the metric.
    when: Condition | None = None
    # Takes the settled config; returns the texts that may replace NAME or K in a run. None: any text.
    parts: Callable[[Any], Iterable[str]] | None = None

    @property
    def is_family(self) -> bool:
        """True if the name has a placeholder."""
        return self.pattern.pattern != re.escape(self.name)

    def name_of(self, part: object) -> str:
        """Return the name of one metric of a family, with `part` in place of NAME or K."""
        return re.sub("NAME|K$", str(part), self.name)

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern that the names match. Its group is the text in place of NAME or K."""
        return _pattern(self.name)


def rows_where(condition: Condition, *rows: Metric) -> tuple[Metric, ...]:
    """Return the rows. Each row that has no condition gets `condition`."""
    return tuple(row if row.when else replace(row, when=condition) for row in rows)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"_K$", r"_(\\d+)", re.escape(name).replace("NAME", "(.+)")))


class MetricTable:
    """Look-up of metric rows by name. If two rows have the same name, the later one replaces the earlier one."""

    def __init__(self, rows: Iterable[Metric]) -> None:
        by_name = {row.name: row for row in rows}
        self.rows = tuple(by_name.values())
        self._singles = {row.name: row for row in self.rows if not row.is_family}
        self._families = [row for row in self.rows if row.is_family]

    def find(self, name: str) -> Metric | None:
        """Return the row with this name, else the row of the family that the name matches; None if there is neither."""
        if name in self._singles:
            return self._singles[name]
        return next((row for row in self._families if row.pattern.fullmatch(name)), None)

    def meaning(self, name: str) -> str:
        """Return the meaning of a metric; empty if it is not declared."""
        row = self.find(name)
        return row.meaning if row else ""


@cache
def installed_rows() -> MetricTable:
    """Return the metric rows that rlctl itself declares."""
    modules = map(import_module, METRICS)
    return MetricTable(chain.from_iterable(module.METRICS for module in modules))


def rows_problem(rows: object) -> str:
    """Return an error text if the attribute `metrics` of a user's class is invalid; "" if it is valid."""
    if isinstance(rows, tuple | list) and all(isinstance(row, Metric) for row in rows):
        return ""
    return f"`metrics` is {rows!r:.80}: give a tuple of rlctl.telemetry.metrics.Metric"


def write_rows(path: Path, rows: Iterable[Metric]) -> None:
    """Write metric rows to a file as JSON. Raises OSError."""
    lines = ",\n".join(json.dumps(as_record(row)) for row in rows)
    write_whole(path, f"[\n{lines}\n]\n")


def as_record(row: Metric) -> dict[str, Any]:
    """Return a row as plain containers, without its functions (`when` and `parts`)."""
    chart = asdict(row.chart) if row.chart else None
    panel = [asdict(panel_row) for panel_row in row.panel]
    return {"name": row.name, "meaning": row.meaning, "unit": row.unit, "chart": chart, "panel": panel}


def from_record(record: dict[str, Any]) -> Metric:
    """Return the row that `as_record` made a record from. Unknown keys, of a later rlctl, are ignored.

    Raises KeyError or TypeError for a damaged record.
    """
    chart = record["chart"]
    return Metric(
        name=str(record["name"]),
        meaning=str(record["meaning"]),
        unit=record["unit"],
        chart=None if chart is None else ReportChart(**_drop_unknown_fields(chart, ReportChart)),
        panel=tuple(PanelRow(**_drop_unknown_fields(panel_row, PanelRow)) for panel_row in record["panel"]),
    )


def _drop_unknown_fields(record: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}


def read_rows(path: Path) -> MetricTable | None:
    """Read the metric rows that a run wrote to `path`; return None if the file is missing or damaged."""
    try:
        return MetricTable(from_record(record) for record in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
