"""The steps that all commands of `rlctl bench` share: check, measure, then show tables, a plot or JSON."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.bench.frame import Bench, Line, Results, Say
from rlctl.cli.arguments import note_repeats
from rlctl.cli.output import FAILED, INTERRUPTED, OK, console
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

# A terminal with at least this many columns shows the wide form of tables.
_WIDE = 120

TrainedModel = Annotated[
    str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny; on GPUs qwen3-1.7b.")
]
RunSettings = Annotated[
    list[str] | None, typer.Option("--set", callback=note_repeats, help="A key=value for every run. Repeatable.")
]


def read_lengths(text: str, problems: list[Problem]) -> tuple[float, float, int]:
    """Return (mean, sigma, cap) of log-normal lengths, in tokens, from a text such as 600,1.0,4096.

    Add a problem to `problems` if the text is invalid.
    """
    try:
        numbers = list(map(float, text.split(",")))
        if len(numbers) == 3 and all(isfinite(number) and number > 0 for number in numbers):
            mean, sigma, cap = numbers
            if cap == int(cap):
                return mean, sigma, int(cap)
    except ValueError:
        pass
    problems.append(Problem("--lengths", "", f"{text!r}: mean, sigma and cap above 0, like 600,1.0,4096"))
    return 1.0, 1.0, 1


def run_bench(bench: Bench, as_json: bool, problems: Iterable[Problem] = (), plot: Path | None = None) -> None:
    """Check a bench, measure, show the results, and end the command with its exit code.

    problems: mistakes in the options that the caller has found. plot: file for the chart.
    Raises ConfigError with every problem at once.
    """
    all_problems = list(_plot_problems(plot))
    all_problems += problems
    all_problems += bench.check()
    if all_problems:
        raise ConfigError(all_problems)
    results = _measure(bench)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=1))
    else:
        show(results, console())
    if plot is not None and (chart := results.chart()) is not None:
        chart.write(plot)
    errors = results.errors()
    for error in errors:
        typer.echo(f"error: {error}", err=True)
    if results.interrupted:
        typer.echo("interrupted: this is what was finished", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(FAILED if errors else OK)


def show(results: Results, out: "Console") -> None:
    """Print the lines and tables of the results' report, in the width of the terminal."""
    from rich.text import Text

    from rlctl.dashboard.console import PIPE_WIDTH, figures, make_table, texts

    if not out.is_terminal:
        out.width = PIPE_WIDTH
    for part in results.report(wide=out.width >= _WIDE):
        if isinstance(part, Line):
            out.print(Text(part.text, part.style))
            continue
        # A cell is (title of its column, text).
        titles = [title for title, _ in part.rows[0]]
        columns = [texts(titles[0])] + [figures(title) for title in titles[1:]]
        table = make_table(*columns, titles="bold", gap=part.gap)
        for index, cells in enumerate(part.rows):
            style = "bold" if index in part.bold else ""
            table.add_row(*[text for _, text in cells], style=style)
        out.print(table)


def _plot_problems(path: Path | None) -> Iterator[Problem]:
    from importlib.util import find_spec

    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        yield Problem("--plot", "", f"{path}: allowed are names that end in .png or .svg")
    if not path.absolute().parent.is_dir():
        yield Problem("--plot", "", f"{path.absolute().parent} is no folder")
    if find_spec("matplotlib") is None:
        yield Problem("--plot", "", "needs matplotlib: pip install 'rlctl[plot]'")


def _measure(bench: Bench) -> Results:
    """Measure with a scratch folder for logs. Remove the folder after success and Ctrl-C; keep it after an error."""
    folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
    try:
        with _progress() as say:
            results = bench.measure(folder, say)
    except KeyboardInterrupt:
        # Nothing was measured. A bench that has measured some rows returns them, marked as interrupted.
        shutil.rmtree(folder, ignore_errors=True)
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (RuntimeError, OSError) as error:
        typer.echo(f"error: {error}\nlogs: {folder}", err=True)
        raise typer.Exit(FAILED) from None
    if results.errors():
        typer.echo(f"logs: {folder}", err=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return results


@contextmanager
def _progress() -> Iterator[Say]:
    """Yield a function that shows progress on stderr: in one changing line on a terminal, else a line for each text."""
    err = console(stderr=True)
    if not sys.stderr.isatty():
        yield err.print
        return
    with err.status("starting") as status:
        yield status.update
