"""The place of a path, or of a plugin's module, that a config names.

It is looked up next to the YAML file with its name, then in the current directory, then among the shipped recipes
(paths alone: a copied recipe still finds its model), then on a hub. An existing path becomes absolute, so that a
resolved config runs from anywhere. `organisation/name` that is no file stays as it is, a hub name, unless
`organisation` is a folder here: then it is a mistyped path. A model may be a run, by its directory or its name, or a
checkpoint: it becomes the weights that they exported.
"""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path

from rlctl.config.builtin import RECIPES
from rlctl.config.errors import did_you_mean, shortened
from rlctl.config.plugins import ROW_GENERATORS
from rlctl.config.provenance import Origin
from rlctl.config.run_weights import exported_weights, names_weights, run_names

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# The hub's own bound is 96 for each half.
_LONGEST_HUB_NAME = 200
# Suffixes of files, never of a hub's name. Wider than `data.files.FILE_SUFFIXES`, which rlctl reads: the path of a
# missing file of another kind, like rows.txt, is no name of a data set on the hub either.
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv", ".gz", ".txt", ".yaml"}


def resolve(text: str, kind: str, origin: Origin, runs: Path | None = None) -> str:
    """Return the absolute path, or the hub name, that `text` means. Raises FileNotFoundError with a line for the user.

    kind: as `fields.spec` has them. runs: the folder in which a model is looked up as a run by its name.
    """
    folders = [*([origin.file.parent] if origin.file is not None else []), Path.cwd(), RECIPES]
    if kind == "plugin":
        file, _, function = text.rpartition(":")
        if file.endswith(".py"):
            return f"{resolve(file, 'template', origin)}:{function}"
        found = _module_file(file, folders[:-1])
        return f"{found}:{function}" if found else text
    if not text:
        raise FileNotFoundError("is empty: a path is needed")
    if kind == "folder":
        return os.path.expanduser(text)
    given = Path(os.path.expanduser(text))
    if kind == "model" and (weights := _find_weights(given, [*folders, *([runs] if runs else [])])):
        return str(weights.resolve())
    for folder in folders:
        # Path.exists raises for an impossible name. A pipe or device has no end.
        if os.path.isfile(folder / given) or (os.path.isdir(folder / given) and kind != "template"):
            return str((folder / given).resolve())
        if os.path.exists(folder / given):
            wanted = "a file, which it" if kind == "template" else "a file or folder, which it"
            raise FileNotFoundError(f"must name {wanted} is not: {shortened(text)}")
    if kind == "dataset" and has_magic(text):
        for folder in folders:
            if glob(str(folder / given), recursive=True):
                return str((folder / given).absolute())
        raise FileNotFoundError(f"no file has a name like {shortened(text)}")
    name = text.partition(":")[0] if kind == "dataset" else text
    if kind == "dataset" and name in ROW_GENERATORS:
        return text
    if kind != "template" and len(name) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(name):
        is_folder = any(os.path.isdir(folder / name.split("/")[0]) for folder in folders)
        if not is_folder and Path(name).suffix not in _DATA_SUFFIXES:
            return text
    near = _nearest_path(given, folders)
    if kind == "model" and runs and not near:
        near = did_you_mean(text, run_names(runs))
    hub = "" if kind == "template" else "; a hub name is organisation/name"
    raise FileNotFoundError(f"no file or folder {shortened(text)}{near or hub}")


def _find_weights(given: Path, folders: list[Path]) -> Path | None:
    """Return the first model in one of `folders`: a Hugging Face folder, or the weights of a run or checkpoint."""
    found = next((folder / given for folder in folders if names_weights(folder / given)), None)
    return exported_weights(found) if found else None


def _module_file(module: str, folders: list[Path]) -> Path | None:
    """Return the file of a module in one of `folders`; None: it is looked up on the Python path.

    A package's module in the current directory is left to Python too: the directory is on its path.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    relative = Path(*parts).with_suffix(".py")
    if len(parts) > 1 and os.path.isfile(relative):
        return None
    return next((folder / relative for folder in folders if os.path.isfile(folder / relative)), None)


def _nearest_path(given: Path, folders: list[Path]) -> str:
    for folder in folders:
        names: list[str] = []
        with suppress(OSError, ValueError):
            names = os.listdir((folder / given).parent)
        if near := get_close_matches(given.name, names, n=1, cutoff=0.6):
            return f"; did you mean {given.parent / near[0]}?"
    return ""
