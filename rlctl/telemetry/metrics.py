"""Declarations of metrics, a row for each name of metrics.jsonl, and the rows that a run keeps in its directory.

A row is declared once: in the folder that measures it, as in `grpo/metric_rows.py` (`config/plugins.py` lists these
modules, none imports torch), or by a user's class, in its attribute `metrics`. The live view and the report are built
from the rows in a run's directory, so that users' metrics and runs of other machines are shown too.
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

# File of a run's rows in its directory.
METRIC_ROWS = "metric_rows.json"
# Decides how a value is shown. A share is 0 to 1, a factor is exact at 1. Further units stand in the meaning.
Unit = Literal["number", "share", "seconds", "factor"]
Algorithm = Literal["grpo", "sft"]
# Sections of a report, in order. Sections of a user's own come after them, and the last one at the end.
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
# Colours of a panel's row.
STYLES = ("cyan", "green", "magenta", "yellow", "blue", "bold red")
# Place of a chart or a panel's row that names none.
LAST = 1000


@dataclass(frozen=True)
class ReportChart:
    """Chart of the report that draws a metric."""

    section: str = OTHERS
    # Metrics with the same title are drawn on one pair of axes. Empty: the metric is alone, below its name.
    title: str = ""
    # Place of the metric in its section. A chart is where the first of its metrics is.
    place: int = LAST
    # Areas one above the other instead of lines; a chart for each run.
    stacked: bool = False

    def with_place(self, place: int) -> "ReportChart":
        """Return the same chart, with another place for a metric in it."""
        return replace(self, place=place)


@dataclass(frozen=True)
class PanelRow:
    """Row of the live view's panel Learning that shows a metric."""

    # At most 10 letters. Empty, for a pattern: the end of each name.
    label: str
    # Place in the panel, from the top.
    place: int = LAST
    style: str = "cyan"
    _: KW_ONLY
    # The algorithm whose runs have the row; None: all.
    algorithm: Algorithm | None = None
    # Shown only while the metric is above 0, and then before all others.
    failure: bool = False
    # Shown only if the metric was ever above 0.
    used: bool = False

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            near = did_you_mean(self.style, STYLES)
            raise ValueError(f"style={self.style} of row {self.label}: must be one of {', '.join(STYLES)}{near}")


@dataclass(frozen=True)
class Condition:
    """Runs that measure a metric, told by their settled config (`preflight.settled.Settled`)."""

    holds: Callable[[Any], bool]
    # Ends the sentence "it is measured only ...".
    where: str


IN_GRPO = Condition(lambda settled: settled.grpo is not None, "in a GRPO run")
IN_SFT = Condition(lambda settled: settled.sft is not None, "in an SFT run")
WITH_SAMPLES = Condition(
    lambda settled: settled.sampling is not None, "where answers are sampled: in a GRPO run, or by validation.recipe"
)


def grpo_where(holds: Callable[[Any], bool], where: str) -> Condition:
    """Return the condition of GRPO runs for whose settled config `holds` is true."""
    return Condition(lambda settled: settled.grpo is not None and holds(settled), where)


IN_ASYNC = grpo_where(lambda settled: settled.config.async_.enabled, "with async.enabled=true")


def ages_of_run(settled: Any) -> list[str]:
    """Return the ages that groups and tokens may have, in steps, for `Metric.parts`."""
    return [str(age) for age in range(settled.config.async_.max_age + 1)]


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric, or of a family of metrics."""

    # Name in metrics.jsonl. NAME in it stands for any text, K for any whole number.
    name: str
    meaning: str
    unit: Unit = "number"
    _: KW_ONLY
    # None: not drawn, since another chart shows as much.
    chart: ReportChart | None = ReportChart()
    panel: Sequence[PanelRow] = ()
    # Value of a step with several updates: their mean, the first one's, or their sum.
    over_updates: Literal["mean", "first", "sum"] = "mean"
    # None: every run measures it.
    when: Condition | None = None
    # Returns the texts or numbers that NAME or K stands for in a run; None: any.
    parts: Callable[[Any], Iterable[str]] | None = None

    @property
    def is_family(self) -> bool:
        """True if the name has a placeholder."""
        return self.pattern.pattern != re.escape(self.name)

    def name_of(self, part: object) -> str:
        """Return the name of one metric of a family. part: in place of NAME or K."""
        return re.sub("NAME|K$", str(part), self.name)

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the names, with the placeholder's part as its group."""
        return _pattern(self.name)


def rows_where(condition: Condition, *rows: Metric) -> tuple[Metric, ...]:
    """Return the rows; those without a condition get this one."""
    return tuple(row if row.when else replace(row, when=condition) for row in rows)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"_K$", r"_(\\d+)", re.escape(name).replace("NAME", "(.+)")))


class MetricTable:
    """Rows by the names that they declare. Of two rows with one name the later one counts."""

    def __init__(self, rows: Iterable[Metric]) -> None:
        by_name = {row.name: row for row in rows}
        self.rows = tuple(by_name.values())
        self._singles = {row.name: row for row in self.rows if not row.is_family}
        self._families = [row for row in self.rows if row.is_family]

    def find(self, name: str) -> Metric | None:
        """Return the row of a metric: its own, else that of its family; None if it is not declared."""
        if name in self._singles:
            return self._singles[name]
        return next((row for row in self._families if row.pattern.fullmatch(name)), None)

    def meaning(self, name: str) -> str:
        """Return the meaning of a metric; empty if it is not declared."""
        row = self.find(name)
        return row.meaning if row else ""


@cache
def installed_rows() -> MetricTable:
    """Return the rows of the installed rlctl."""
    modules = map(import_module, METRICS)
    return MetricTable(chain.from_iterable(module.METRICS for module in modules))


def rows_problem(rows: object) -> str:
    """Return the problem with the attribute `metrics` of a user's class; empty if there is none."""
    if isinstance(rows, tuple | list) and all(isinstance(row, Metric) for row in rows):
        return ""
    return f"`metrics` is {rows!r:.80}: give a tuple of rlctl.telemetry.metrics.Metric"


def write_rows(path: Path, rows: Iterable[Metric]) -> None:
    """Write rows into a run's directory. Raises OSError."""
    lines = ",\n".join(json.dumps(as_record(row)) for row in rows)
    write_whole(path, f"[\n{lines}\n]\n")


def as_record(row: Metric) -> dict[str, Any]:
    """Return a row as plain containers, without the rules for the settled config."""
    chart = asdict(row.chart) if row.chart else None
    panel = [asdict(panel_row) for panel_row in row.panel]
    return {"name": row.name, "meaning": row.meaning, "unit": row.unit, "chart": chart, "panel": panel}


def from_record(record: dict[str, Any]) -> Metric:
    """Return the row of `as_record`. Keys of a later version are left out. Raises KeyError, TypeError."""
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
    """Return the rows of a run's directory; None if it has none, or none that can be read."""
    try:
        return MetricTable(from_record(record) for record in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
