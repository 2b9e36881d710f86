"""`rlctl env tasks`: the tasks of environments that ship, and those in folders of other projects."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli.arguments import parse_arguments
from rlctl.cli.output import note
from rlctl.config.errors import ConfigError, Problem

Seed = Annotated[int, typer.Option(help="The seed of the first episode or task.", min=0)]


def tasks(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One that ships, or harbor.")],
    count: Annotated[int, typer.Option("--count", "-n", help="The tasks to print.", min=1)] = 10,
    held_out: Annotated[bool, typer.Option("--held-out", help="Print tasks that are never among the others.")] = False,
    seed: Seed = 0,
    folder: Annotated[Path | None, typer.Option(help="With harbor: the folder of its task folders.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="With harbor: KEY=VALUE of environment.args, repeatable.")
    ] = None,
) -> None:
    """Print tasks of an environment that ships, a JSON row each, equal for equal seeds.

    With harbor: all task folders below --folder that run here. Those that do not are named with the reason.
    """
    from itertools import islice

    from rlctl.config.errors import did_you_mean
    from rlctl.config.plugins import ENVIRONMENTS, FOLDER_TASKS
    from rlctl.evaluation.environment_check import shipped_tasks

    names = [*ENVIRONMENTS, *FOLDER_TASKS]
    if name not in names:
        raise ConfigError([Problem("NAME", "", f"must be {', '.join(names)}, not {name}{did_you_mean(name, names)}")])
    if (folder is not None) != (name in FOLDER_TASKS):
        problem = "must name the folder of the tasks" if folder is None else f"is for {', '.join(FOLDER_TASKS)} alone"
        raise ConfigError([Problem("--folder", "", problem)])
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError([Problem("--folder", "", f"no folder {folder}")])
        _print_folder_tasks(name, folder, parse_arguments(arg))
        return
    for row in islice(shipped_tasks(name, seed, held_out), count):
        typer.echo(json.dumps(row))


def _print_folder_tasks(name: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Print the tasks of a shelf in a folder, and the refused ones with their reasons. Exit code 1 if all are."""
    from rlctl.config.plugins import FOLDER_TASKS
    from rlctl.utils.user_code import load_object

    num_tasks = 0
    for row, refusal in load_object(FOLDER_TASKS[name])(folder, **arguments):
        if refusal:
            note([f"refused: {refusal}"])
        else:
            num_tasks += 1
            typer.echo(json.dumps(row))
    if num_tasks == 0:
        raise ConfigError([Problem("--folder", "", f"no task below {folder} runs here")])
