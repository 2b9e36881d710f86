"""`rlctl recipes`: lists, shows and copies the complete runs that come with rlctl."""

import shlex
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.completion import complete_recipe
from rlctl.cli.output import console, examples
from rlctl.config.builtin import ALGORITHMS, RECIPES, algorithm_names, recipe_names
from rlctl.config.errors import ConfigError, Problem, did_you_mean

app = typer.Typer(help="List, show and copy the recipes that come with rlctl.", no_args_is_help=True)

_HOW_TO_TAKE = "An algorithm goes over a recipe: `defaults: [my.yaml, algorithms/NAME]`."
Name = Annotated[
    str,
    typer.Argument(help="A name from `rlctl recipes list`.", show_default=False, autocompletion=complete_recipe),
]


@app.command("list", epilog=examples("rlctl recipes list"))
def list_() -> None:
    """List every recipe with its result, and the algorithms for any recipe."""
    from rlctl.dashboard.console import make_table, names, texts

    out = console()
    algorithms = [f"{ALGORITHMS.name}/{name}" for name in algorithm_names()]
    for title, file_names in (("recipe", recipe_names()), ("algorithm", algorithms)):
        table = make_table(names(title), texts("what it is"), titles="bold")
        for name in file_names:
            lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            opening = takewhile(lambda line: line.startswith("#"), lines)
            table.add_row(name, " ".join(line.lstrip("# ") for line in opening))
        out.print(table, "", soft_wrap=False)
    out.print(_HOW_TO_TAKE, style="dim", markup=False, highlight=False)


@app.command(epilog=examples("rlctl recipes show grpo-tiny", "rlctl config show grpo-tiny --origin"))
def show(name: Name) -> None:
    """Print a recipe as it is written; `rlctl config show NAME` adds the defaults."""
    typer.echo(_find_recipe_file(name).read_text(encoding="utf-8"), nl=False)


@app.command(epilog=examples("rlctl recipes copy grpo-tiny", "rlctl recipes copy grpo-tiny experiments/sums.yaml"))
def copy(
    name: Name,
    to: Annotated[Path | None, typer.Argument(help="A file or folder; NAME.yaml here if left out.")] = None,
) -> None:
    """Copy a recipe, to change it."""
    from rlctl.config.compose import compose
    from rlctl.config.provenance import plain

    source = _find_recipe_file(name)
    target = to or Path(source.name)
    if target.is_dir():
        target /= source.name
    if target.exists():
        raise ConfigError([Problem(str(target), "", "exists; name another file")])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError([Problem(str(target), "", f"cannot be written: {error.strerror}")]) from error
    kind = plain(compose(source, [])).get("kind")
    run = f"rlctl train {kind} {shlex.quote(str(target))}"
    typer.echo(f"{target}\n{f'run it: {run}' if kind else _HOW_TO_TAKE}")


def _find_recipe_file(name: str) -> Path:
    path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        hint = did_you_mean(name, recipe_names()) or "; see `rlctl recipes list`"
        raise ConfigError([Problem(name, "", f"no such recipe{hint}")])
    return path
