"""The frame of `rlctl bench`: a bench checks itself and measures; its results are text with tables, a chart and JSON.

Nothing here prints: `rlctl.cli.bench` does. A chart is drawn with matplotlib, which is imported only then.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rlctl.config.errors import Problem, did_you_mean

# Told what begins, for the line that shows progress.
Say = Callable[[str], None]
# The cells of a table's row, each as (column, text).
Cells = list[tuple[str, str]]


class Bench(ABC):
    """One measurement, with everything it needs to know in its fields."""

    def check(self) -> list[Problem]:
        """Return what would keep it from measuring; asked before anything is started."""
        return []

    @abstractmethod
    def measure(self, folder: Path, say: Say) -> "Results":
        """Measure with logs and temporary files in `folder`, which is empty and goes afterwards.

        Raises ConfigError for settings that only a run's own checks refuse, and RuntimeError, OSError or an error of
        `rlctl.workers.errors` for a measurement that failed.
        """


@dataclass(frozen=True)
class Line:
    """A line of text. style: as rich names it. cut: an ellipsis ends it at the terminal's edge instead of a break."""

    text: str
    style: str = ""
    cut: bool = False


@dataclass(frozen=True)
class ResultTable:
    """Rows that name the same columns; the first column names the row. bold: rows' indices. gap: between columns."""

    rows: list[Cells]
    bold: Sequence[int] = ()
    gap: int = 2


@dataclass(frozen=True)
class Bar:
    """One bar of a chart. text: written at its end. ours: coloured as the subject, not as what it is compared with."""

    name: str
    value: float
    text: str
    ours: bool


@dataclass(frozen=True)
class Chart:
    """Horizontal bars from top to bottom. label: of the axis. bound: a dashed line across all of them."""

    title: str
    label: str
    bars: list[Bar] = field(default_factory=list)
    bound: float | None = None

    def write(self, path: Path) -> None:
        """Write a PNG or SVG, by the name's ending; the file appears whole or not at all. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        bars = self.bars[::-1]
        figure = Figure(figsize=(9, 1.2 + 0.42 * len(bars)), layout="constrained")
        axes: Any = figure.add_subplot()
        colours = ["#3b7dd8" if bar.ours else "#a9b4c4" for bar in bars]
        drawn = axes.barh([bar.name for bar in bars], [bar.value for bar in bars], color=colours, height=0.66)
        axes.bar_label(drawn, [bar.text for bar in bars], padding=4, fontsize=8)
        if self.bound:
            axes.axvline(self.bound, color="#c0392b", linewidth=1, linestyle="--")
        axes.set_xlim(0, max([self.bound or 0.0, *(bar.value for bar in bars)]) * 1.25)
        axes.set_xlabel(self.label)
        axes.set_title(self.title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, format=path.suffix[1:], dpi=150)
        partial.replace(path)


class Results(ABC):
    """Measurements of one bench: a dataclass with `rows`, in the order measured."""

    rows: Sequence[Any]

    @abstractmethod
    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return what is printed. wide: there is room for at least 120 characters."""

    @abstractmethod
    def chart(self) -> Chart:
        """Return what `--plot` draws."""

    def derived(self, row: Any) -> dict[str, Any]:
        """Return a row's figures that follow from its fields, for JSON."""
        return {}

    def as_json(self) -> Any:
        """Return all fields, and with each row its derived figures."""
        rows = [asdict(row) | self.derived(row) for row in self.rows]
        return asdict(cast(Any, self)) | {"rows": rows}

    def errors(self) -> list[str]:
        """Return what makes the command end with 1 though everything was measured, a line each."""
        return []


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def words(option: str, given: str, allowed: Iterable[str], problems: list[Problem]) -> list[Any]:
    """Return the parts of a list with commas; a problem for each that is not allowed."""
    allowed = tuple(allowed)
    parts = [part.strip() for part in given.split(",")]
    for part in parts:
        if part not in allowed:
            hint = did_you_mean(part, allowed)
            problems.append(Problem(option, "", f"{part!r} is not allowed{hint}; allowed: {', '.join(allowed)}"))
    return parts


def numbers(
    option: str, given: str, like: str, problems: list[Problem], units: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Return the numbers of a list with commas; a problem, with an example, for the first part that is none."""
    found, units = [], units or {"": 1}
    for part in (part.strip() for part in given.split(",")):
        number = part.rstrip("KMBkmb")
        unit = part[len(number) :].upper()
        if not number.isdecimal() or int(number) < 1 or unit not in units:
            problems.append(Problem(option, "", f"{part!r}: numbers from 1 on with commas, like {like}"))
            return ()
        found.append(int(number) * units[unit])
    return tuple(found)
