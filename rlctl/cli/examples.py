"""`rlctl examples`: lists and copies the examples that come with rlctl."""

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.completion import complete_example
from rlctl.cli.output import console, examples
from rlctl.config.builtin import EXAMPLES, example_names
from rlctl.config.errors import ConfigError, Problem, did_you_mean

app = typer.Typer(help="List and copy examples: parts of your own, and ways to a model.", no_args_is_help=True)

# Files that a run leaves in an example's folder. They are not copied.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "runs", ".*")


@app.command("list", epilog=examples("rlctl examples list"))
def list_() -> None:
    """List every example with what it shows."""
    from rlctl.dashboard.console import make_table, names, texts

    table = make_table(names("example"), texts("what it shows"), titles="bold")
    for name in example_names():
        table.add_row(name, _read_summary(name))
    console().print(table, soft_wrap=False)


@app.command(epilog=examples("rlctl examples copy reward", "rlctl examples copy environment my-task"))
def copy(
    name: Annotated[
        str,
        typer.Argument(help="A name from `rlctl examples list`.", show_default=False, autocompletion=complete_example),
    ],
    to: Annotated[Path | None, typer.Argument(help="A new folder; NAME here if left out.")] = None,
) -> None:
    """Copy the folder of an example, to change it, and print its commands."""
    source = EXAMPLES / name
    if name not in example_names():
        hint = did_you_mean(name, example_names()) or "; see `rlctl examples list`"
        raise ConfigError([Problem(name, "", f"no such example{hint}")])
    target = to or Path(name)
    if target.exists():
        raise ConfigError([Problem(str(target), "", "exists; name another folder")])
    try:
        shutil.copytree(source, target, ignore=_LEFT_OUT)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([Problem(str(target), "", f"cannot be written: {reason}")]) from error
    typer.echo("\n".join([f"cd {shlex.quote(str(target))}", *_read_commands(name)]))


def _read_page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def _read_summary(name: str) -> str:
    """Return the first paragraph after the title of an example's README.md."""
    return " ".join(_read_page(name).split("\n\n")[1].split())


def _read_commands(name: str) -> list[str]:
    """Return the lines of the first code block of an example's README.md."""
    return _read_page(name).split("```")[1].strip().splitlines()
