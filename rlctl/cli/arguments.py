"""Arguments that several commands share: at most one recipe, and any number of key=value overrides."""

import math
import os
from typing import Annotated, Any

import typer

from rlctl.cli.completion import complete_arguments, complete_run
from rlctl.config.errors import ConfigError, Problem

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE | KEY=VALUE",
        help="The name or file of a recipe, then overrides such as trainer.optimizer.lr=1e-5 or rewards.0.weight=2.",
        show_default=False,
        autocompletion=complete_arguments,
    ),
]
WEIGHTS = typer.Argument(
    metavar="CHECKPOINT | FOLDER | RUN",
    help="A checkpoint, a Hugging Face folder or hub name, or a run: its newest checkpoint.",
    show_default=False,
    autocompletion=complete_run,
)
OfStep = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Of a run: the checkpoint of this step.", min=0)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print what is added, until Ctrl-C.")]
Lines = Annotated[int, typer.Option("--lines", "-n", help="Print the last lines of each file, this many.", min=0)]


def split_any(arguments: list[str] | None, default: str) -> tuple[str, list[str]]:
    """Return (recipe, overrides) for a command that takes runs of every kind, for example `rlctl config show`.

    default: the recipe if the arguments name none. The word "grpo" or "sft" in place of a recipe means the kind's tiny
    recipe, as in `rlctl train grpo`, unless a file has that name.
    """
    from rlctl.preflight.load import TINY

    recipe, overrides = split(arguments)
    if recipe in TINY and not any(os.path.isfile(name) for name in (recipe, f"{recipe}.yaml")):
        recipe = TINY[recipe]
    return recipe or default, overrides


def split(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Return (recipe or None, overrides). Raises ConfigError if there are two recipes."""
    recipe: str | None = None
    overrides: list[str] = []
    problems: list[Problem] = []
    for number, text in enumerate(arguments or [], start=1):
        if "=" in text and not os.path.isfile(text):
            overrides.append(text)
        elif recipe is None:
            recipe = text
        else:
            mistake = f"a second recipe after {recipe}; an override is key=value"
            problems.append(Problem(f"argument {number}", text, mistake))
    if problems:
        raise ConfigError(problems)
    return recipe, note_repeats(overrides)


def note_repeats(overrides: list[str] | None) -> list[str]:
    """Print a note for each override that replaces an earlier one of the same key. Return all overrides."""
    if overrides and len(overrides) > 1:
        from rlctl.cli.output import note
        from rlctl.config.compose import describe_repeats

        note(describe_repeats(overrides))
    return overrides or []


def finite(value: float | None) -> float | None:
    """Return the number of an option. Raises BadParameter for infinity and NaN, which Typer's `min` lets through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, not {value}")
    return value


def parse_arguments(texts: list[str] | None) -> dict[str, Any]:
    """Return the environment's arguments by name, from KEY=VALUE texts. Raises ConfigError for any other text."""
    import yaml

    arguments: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        is_yaml = True
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            is_yaml = False
        if not equals or not is_yaml or not key.isidentifier():
            raise ConfigError([Problem("--arg", "", f"must be KEY=VALUE with a YAML value, not {text}")])
    return arguments
