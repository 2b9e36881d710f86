"""Files shipped with rlctl (configs/ with all defaults, recipes/, examples/), and the lookup of a recipe by name."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.run_weights import run_names

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "share"
# A wheel has these folders inside the package, a checkout next to the package.
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent

CONFIGS = _ROOT / "configs"
RECIPES = _ROOT / "recipes"
# Files named after papers. Each sets the keys of the paper's algorithm, to be merged over any recipe.
ALGORITHMS = RECIPES / "algorithms"
EXAMPLES = _ROOT / "examples"


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, for `rlctl train grpo NAME`."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def algorithm_names() -> list[str]:
    """Return the names of the shipped algorithms. A recipe inherits one by `defaults: [..., algorithms/NAME]`."""
    return sorted(path.stem for path in ALGORITHMS.glob("*.yaml"))


def example_names() -> list[str]:
    """Return the names of the shipped examples. Each is a folder with a README.md."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def runs_folder(overrides: Iterable[str] = ()) -> Path:
    """Return the folder in which runs are found by name: `run.dir` in the overrides, or its default."""
    folders = [text.partition("=")[2] for text in overrides if text.startswith("run.dir=")]
    return Path(folders[-1]) if folders else _default_runs_folder()


@cache
def _default_runs_folder() -> Path:
    import yaml

    return Path(yaml.safe_load((CONFIGS / "base.yaml").read_text())["run"]["dir"])


def find_recipe(recipe: str) -> Path:
    """Return the file for `recipe`: a path, a run's directory, or the name of a shipped recipe or a run."""
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
    """Return the file `name`, with or without .yaml, in the folder `near`, the shipped recipes or the shipped configs.

    other_than: a file to skip, since a recipe may have the name of the file that it inherits.
    """
    for folder in (near, RECIPES, CONFIGS):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            # Path.is_file would raise for an impossible name.
            if os.path.isfile(candidate) and candidate.resolve() != other_than:
                return candidate.resolve()
    return None


def is_shipped(path: Path) -> bool:
    """Return True if a file is in rlctl's shipped configs or recipes."""
    return path.is_relative_to(CONFIGS) or path.is_relative_to(RECIPES)
