"""Interfaces of `rlctl bench`: a `Bench` checks and measures. Its `Results` become text, tables, a chart and JSON.

`rlctl/cli/bench_frame.py` prints them; this module prints nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rlctl.bench.charts import CurveChart
from rlctl.config.errors import Problem, did_you_mean

Measured = TypeVar("Measured")
# Displays progress. It is called with one line on the measurement that begins.
Say = Callable[[str], None]
# One table row: pairs of a column's title and the cell's text.
Cells = list[tuple[str, str]]


class Bench(ABC):
    """One measurement; its fields hold all options."""

    def check(self) -> list[Problem]:
        """Return every reason why this bench cannot be measured. It is called before anything starts."""
        return []

    @abstractmethod
    def measure(self, folder: Path, say: Say) -> "Results":
        """Measure and return the results. folder: an empty scratch folder for logs and temporary files.

        Raises ConfigError for settings that the checks of a run refuse, and RuntimeError, OSError or an error of
        `rlctl.workers.errors` for a failed measurement.
        """


@dataclass(frozen=True)
class Line:
    """One line of text."""

    text: str
    style: str = ""  # a style of the package rich, for example "dim"


@dataclass(frozen=True)
class ResultTable:
    """Table of rows with the same columns. The first column names the row."""

    rows: list[Cells]
    bold: Sequence[int] = ()  # indices of rows in bold
    gap: int = 2  # spaces between columns


class Results(ABC):
    """Results of one bench: a dataclass with a field `rows`, in the order in which they were measured."""

    rows: Sequence[Any]
    # True if Ctrl-C ended the bench early: then some rows are missing.
    interrupted: bool = False

    @abstractmethod
    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return the lines and tables to print. wide: the terminal has at least 120 columns."""

    def chart(self) -> CurveChart | None:
        """Return the chart of `--plot`; None for a bench without that option."""
        return None

    def derived_figures(self, row: Any) -> dict[str, Any]:
        """Return figures computed from a row's fields, by name. `as_json` adds them to the row."""
        return {}

    def as_json(self) -> Any:
        """Return all fields as plain containers. Each row also has its derived figures."""
        rows = [asdict(row) | self.derived_figures(row) for row in self.rows]
        return asdict(cast(Any, self)) | {"rows": rows}

    def errors(self) -> list[str]:
        """Return one line for each reason to exit with code 1 although all was measured, such as wrong weights."""
        return []


def until_interrupted(measurements: Iterable[Measured]) -> tuple[list[Measured], bool]:
    """Collect measured rows until the iterator ends or Ctrl-C. Return them, and True if Ctrl-C ended the measurement.

    Raises KeyboardInterrupt if Ctrl-C came before the first row.
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
    """Return the words of a comma-separated list. Add a problem for each word that is not in `allowed`.

    option: name of the option in a problem.
    """
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
    """Return the numbers of a comma-separated list. A number may end with a unit, such as KB in 7KB.

    units: name -> factor. like: example of a valid list. If a part is not a number, add a problem with the example and
    return an empty tuple.
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
