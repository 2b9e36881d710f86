"""What the commands of `rlctl bench` share: checks of what is asked for, and how a measurement ends."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from rlctl.cli.output import FAILED, INTERRUPTED, console
from rlctl.config.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

Results = TypeVar("Results")
Say = Callable[[str], None]


def check_model(model: str, problems: list[Problem]) -> str:
    """The model's name, once it is known to be a shape or a folder with a config.json."""
    from rlctl.bench.models import SHAPES

    if model not in SHAPES and not (Path(model) / "config.json").is_file():
        hint = did_you_mean(model, SHAPES)
        allowed = f"{', '.join(SHAPES)}, or a folder with a config.json"
        problems.append(Problem("--model", "", f"{model} is no model{hint}; allowed: {allowed}"))
    return model


def words(option: str, given: str, allowed: Iterable[str], problems: list[Problem]) -> list[Any]:
    """The parts of a list with commas."""
    allowed = tuple(allowed)
    parts = [part.strip() for part in given.split(",")]
    for part in parts:
        if part not in allowed:
            hint = did_you_mean(part, allowed)
            problems.append(Problem(option, "", f"{part!r} is not allowed{hint}; allowed: {', '.join(allowed)}"))
    return parts


def named(option: str, given: str, names: Mapping[str, str], problems: list[Problem]) -> list[str]:
    """What the parts of a list with commas stand for."""
    return [names[part] for part in words(option, given, names, problems) if part in names]


def check_plot(path: Path | None, problems: list[Problem]) -> None:
    """What is wrong with the file of a plot."""
    from importlib.util import find_spec

    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        problems.append(Problem("--plot", "", f"{path}: allowed are names that end in .png or .svg"))
    if not path.absolute().parent.is_dir():
        problems.append(Problem("--plot", "", f"{path.absolute().parent} is no folder"))
    if find_spec("matplotlib") is None:
        problems.append(Problem("--plot", "", "needs matplotlib: pip install 'rlctl[plot]'"))


def tell(
    facts: object, show: Callable[["Console"], None], as_json: bool, draw: Callable[[Path], None], plot: Path | None
) -> None:
    """Results on stdout, as JSON or as `show` puts them there; then the plot, if one is wanted."""
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        show(console())
    if plot is not None:
        draw(plot)


def finish(measure: Callable[[Say], Results], report: Callable[[Results], int], folder: Path) -> int:
    """Measure, then report what was found; returns the exit code.

    `folder` goes when all is well and after Ctrl-C; after an error its logs stay, and where they are is said.
    """
    from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout

    try:
        with telling() as say:
            results = measure(say)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (WorkerError, WorkerDied, WorkerTimeout, RuntimeError, OSError) as error:
        typer.echo(f"error: {error}\nlogs: {folder}", err=True)
        return FAILED
    shutil.rmtree(folder, ignore_errors=True)
    return report(results)


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """What is under way, on stderr: a line that changes on a terminal, lines elsewhere."""
    err = console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda what: err.print(what)
        return
    with err.status("starting Ray") as status:
        yield lambda what: status.update(what)
