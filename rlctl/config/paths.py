"""Where a path in a config leads: beside the YAML file that names it, then in the current directory, then among
the shipped recipes (so that a copied recipe still finds its model), then a hub.

A path that exists becomes absolute, so that a resolved config runs from anywhere. `organisation/name` that is no
file stays as it is, a hub name, unless `organisation` is a folder here: then it is a mistyped path.
"""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from rlctl.config.errors import shortened
from rlctl.config.shipped import RECIPES
from rlctl.config.tree import Origin

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The hub's own bound is 96 for each half.
_LONGEST_HUB_NAME = 200
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv", ".txt", ".yaml"}


def resolve(text: str, kind: str, origin: Origin) -> str:
    """The absolute path, or the hub name, that `text` means. Raises FileNotFoundError with one line for the user."""
    if kind == "reward":
        file, _, function = text.rpartition(":")
        return f"{resolve(file, 'template', origin)}:{function}" if file.endswith(".py") else text
    if not text:
        raise FileNotFoundError("is empty: a path is needed")
    if kind == "folder":
        return os.path.expanduser(text)
    given = Path(os.path.expanduser(text))
    folders = [Path.cwd(), RECIPES]
    if origin.file is not None:
        folders.insert(0, origin.file.parent)
    for folder in folders:
        # Path.exists would raise for what no file can be named. A pipe or device has no end.
        if os.path.isfile(folder / given) or (os.path.isdir(folder / given) and kind != "template"):
            return str((folder / given).resolve())
        if os.path.exists(folder / given):
            wanted = "a file, which it" if kind == "template" else "a file or folder, which it"
            raise FileNotFoundError(f"must name {wanted} is not: {shortened(text)}")
    name = text.partition(":")[0] if kind == "dataset" else text
    if kind != "template" and _is_hub_name(name, folders):
        return text
    hub = "" if kind == "template" else "; a hub name is organisation/name"
    raise FileNotFoundError(f"no file or folder {shortened(text)}{_nearest(given, folders) or hub}")


def _is_hub_name(text: str, folders: list[Path]) -> bool:
    if (
        len(text) > _LONGEST_HUB_NAME
        or not _HUB_NAME.fullmatch(text)
        or text.startswith(".")
        or Path(text).suffix in _DATA_SUFFIXES
    ):
        return False
    return not any(os.path.isdir(folder / text.split("/")[0]) for folder in folders)


def _nearest(given: Path, folders: list[Path]) -> str:
    for folder in folders:
        parent = (folder / given).parent
        names = _names(parent)
        if near := get_close_matches(given.name, names, n=1, cutoff=0.6):
            return f"; did you mean {given.parent / near[0]}?"
    return ""


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []
