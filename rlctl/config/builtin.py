"""The files that come with rlctl: configs/ with all defaults, recipes/, examples/; and the file of a name."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.run_weights import run_names

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "share"
# A wheel carries the folders inside the package; a checkout has them next to the package.
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent

CONFIGS = _ROOT / "configs"
RECIPES = _ROOT / "recipes"
# Losses, advantages and the like by the name of a paper: keys to put over any recipe.
ALGORITHMS = RECIPES / "algorithms"
EXAMPLES = _ROOT / "examples"


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, as `rlctl train grpo NAME` takes them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def algorithm_names() -> list[str]:
    """Return the names of the shipped algorithms; a recipe takes one by `defaults: [..., algorithms/NAME]`."""
    return sorted(path.stem for path in ALGORITHMS.glob("*.yaml"))


def example_names() -> list[str]:
    """Return the names of the shipped examples, each a folder with a page."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def runs_folder(overrides: Iterable[str] = ()) -> Path:
    """Return the folder in which a run is looked up by its name: `run.dir` of the overrides, or its default."""
    folders = [text.partition("=")[2] for text in overrides if text.startswith("run.dir=")]
    return Path(folders[-1]) if folders else _default_runs_folder()


@cache
def _default_runs_folder() -> Path:
    import yaml

    return Path(yaml.safe_load((CONFIGS / "base.yaml").read_text())["run"]["dir"])


def find_recipe(recipe: str) -> Path:
    """Return the file that a person means: a path, a run's directory, a shipped recipe's name or a run's."""
    path = Path(os.path.expanduser(recipe))
    if os.path.isfile(path / "config.yaml"):
        path /= "config.yaml"
    file = find(str(path), Path.cwd())
    if file is not None:
        return file
    runs = runs_folder()
    run_config = runs / path / "config.yaml"
    if os.path.isfile(run_config):
        return run_config.resolve()
    hint = did_you_mean(path.stem, recipe_names() + run_names(runs)) or "; see `rlctl recipes list`"
    raise ConfigError([Problem(recipe, "", f"no such recipe or file{hint}")])


def find(name: str, near: Path, other_than: Path | None = None) -> Path | None:
    """Return `name`, with or without .yaml, in folder `near`, else among the shipped recipes, else shipped configs.

    other_than: a file to leave out, since a recipe may have the name of its parent.
    """
    for folder in (near, RECIPES, CONFIGS):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            # Path.is_file raises for an impossible name.
            if os.path.isfile(candidate) and candidate.resolve() != other_than:
                return candidate.resolve()
    return None


def is_shipped(path: Path) -> bool:
    """Return True if a file is part of rlctl rather than the user's own."""
    return path.is_relative_to(CONFIGS) or path.is_relative_to(RECIPES)
