"""The YAML that comes with rlctl: defaults in configs/, complete runs in recipes/."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "share"
# A wheel carries the folders inside the package; a checkout has them beside it.
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent

CONFIGS = _ROOT / "configs"
RECIPES = _ROOT / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, as `rlctl train grpo NAME` takes them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find(name: str, beside: Path, other_than: Path | None = None) -> Path | None:
    """`name`, with or without .yaml, in `beside`, then among the shipped recipes, then the shipped configs.

    other_than: a file that is not meant, so that a recipe may have the name of what it inherits.
    """
    for folder in (beside, RECIPES, CONFIGS):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            # Path.is_file would raise for what no file can be named.
            if os.path.isfile(candidate) and candidate.resolve() != other_than:
                return candidate.resolve()
    return None


def is_shipped(path: Path) -> bool:
    """Whether a file is part of rlctl rather than the user's own."""
    return path.is_relative_to(CONFIGS) or path.is_relative_to(RECIPES)
