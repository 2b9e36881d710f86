"""Interfaces of `rlctl bench`: a `Bench` checks and measures; its `Results` become text, tables, a chart and JSON.

Nothing here prints: `rlctl.cli.bench` does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rlctl.bench.charts import CurveChart
from rlctl.config.errors import Problem, did_you_mean

Measured = TypeVar("Measured")
# Receives one line about the part that begins, for the display of progress.
Say = Callable[[str], None]
# Cells of one table row, each as (column, text).
Cells = list[tuple[str, str]]


class Bench(ABC):
    """One measurement; its fields hold all options."""

    def check(self) -> list[Problem]:
        """Return every reason why it cannot be measured; called before anything starts."""
        return []

    @abstractmethod
    def measure(self, folder: Path, say: Say) -> "Results":
        """Measure, with logs and temporary files in the empty `folder`, which is removed afterwards.

        Raises ConfigError for settings refused by a run's own checks, and RuntimeError, OSError or an error of
        `rlctl.workers.errors` for a failed measurement.
        """


@dataclass(frozen=True)
class Line:
    """One line of text."""

    text: str
    style: str = ""  # as rich names it


@dataclass(frozen=True)
class ResultTable:
    """Rows with the same columns; the first column names the row."""

    rows: list[Cells]
    bold: Sequence[int] = ()  # indices of rows in bold
    gap: int = 2  # spaces between columns


class Results(ABC):
    """Measurements of one bench: a dataclass with `rows`, in the order measured."""

    rows: Sequence[Any]
    # True after Ctrl-C: the rows were measured until then.
    interrupted: bool = False

    @abstractmethod
    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return the printed text. wide: the terminal has at least 120 columns."""

    def chart(self) -> CurveChart | None:
        """Return the chart of `--plot`; None for a bench without that option."""
        return None

    def derived_figures(self, row: Any) -> dict[str, Any]:
        """Return the figures of a row that follow from its fields, for JSON."""
        return {}

    def as_json(self) -> Any:
        """Return all fields, and with each row its derived figures."""
        rows = [asdict(row) | self.derived_figures(row) for row in self.rows]
        return asdict(cast(Any, self)) | {"rows": rows}

    def errors(self) -> list[str]:
        """Return one line for each reason to end with exit code 1 though everything was measured."""
        return []


def until_interrupted(measurements: Iterable[Measured]) -> tuple[list[Measured], bool]:
    """Return the measured rows, and True if Ctrl-C ended the measurement.

    Raises KeyboardInterrupt if nothing was measured until then.
    """
    rows: list[Measured] = []
    try:
        for row in measurements:
            rows.append(row)
    except KeyboardInterrupt:
        if not rows:
            raise
        return rows, True
    return rows, False


def words(option: str, text: str, allowed: Iterable[str], problems: list[Problem]) -> list[Any]:
    """Read the parts of a comma-separated list; add a problem for each that is not allowed."""
    allowed = tuple(allowed)
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in allowed:
            hint = did_you_mean(part, allowed)
            problems.append(Problem(option, "", f"{part!r} is not allowed{hint}; allowed: {', '.join(allowed)}"))
    return parts


def numbers(
    option: str, text: str, like: str, problems: list[Problem], units: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Read the numbers of a comma-separated list, each perhaps with one of the units (name -> factor).

    Adds a problem with the example `like` for the first part that is no number, and then returns nothing.
    """
    values = []
    units = units or {"": 1}
    for part in (part.strip() for part in text.split(",")):
        number = part.rstrip("KMBkmb")
        unit = part[len(number) :].upper()
        if not number.isdecimal() or int(number) < 1 or unit not in units:
            problems.append(Problem(option, "", f"{part!r}: numbers from 1 on with commas, like {like}"))
            return ()
        values.append(int(number) * units[unit])
    return tuple(values)
