"""Resolution of paths, hub names and plugin modules in a config.

A path is looked up next to its YAML file, then in the current directory, then among the shipped recipes. There a copied
recipe still finds its model; modules are not looked up there. An existing path becomes absolute, so that a resolved
config runs from anywhere. `organisation/name` that is no file is a hub name and stays as it is. If `organisation` is a
folder here, it is a mistyped path. A model may be a run, by its directory or name, or a checkpoint: the path then
becomes the folder of its exported weights.
"""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path

from rlctl.config.builtin import RECIPES
from rlctl.config.errors import did_you_mean, shorten
from rlctl.config.plugins import ROW_GENERATORS
from rlctl.config.provenance import Origin
from rlctl.config.run_weights import exported_weights, names_weights, run_names

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Most letters of a hub name. The hub allows 96 for each half.
_LONGEST_HUB_NAME = 200
# A text with such a suffix is a file path and no hub name. The set is larger than `data.files.FILE_SUFFIXES`, the files
# that rlctl reads: a missing rows.txt is no hub data set either.
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv", ".gz", ".txt", ".yaml"}


def resolve(text: str, kind: str, origin: Origin, runs: Path | None = None) -> str:
    """Return the absolute path or hub name for `text`. Raises FileNotFoundError with a line for the user.

    kind: see `path` of `fields.spec`. runs: folder in which a model is looked up as the name of a run.
    """
    folders = [Path.cwd(), RECIPES]
    if origin.file is not None:
        folders.insert(0, origin.file.parent)
    if kind == "plugin":
        module, _, function = text.rpartition(":")
        if module.endswith(".py"):
            return f"{resolve(module, 'template', origin)}:{function}"
        # Modules are not looked up among the recipes, the last folder.
        module_file = _module_file(module, folders[:-1])
        return f"{module_file}:{function}" if module_file else text
    if not text:
        raise FileNotFoundError("is empty: a path is needed")
    if kind == "folder":
        return os.path.expanduser(text)
    path = Path(os.path.expanduser(text))
    model_folders = [*folders, runs] if runs else folders
    if kind == "model" and (weights := _find_weights(path, model_folders)):
        return str(weights.resolve())
    for folder in folders:
        # os.path functions, because Path.exists raises for an impossible name. Pipes and devices are refused: they may
        # never end.
        if os.path.isfile(folder / path) or (os.path.isdir(folder / path) and kind != "template"):
            return str((folder / path).resolve())
        if os.path.exists(folder / path):
            allowed = "a file" if kind == "template" else "a file or folder"
            raise FileNotFoundError(f"must name {allowed}, which it is not: {shorten(text)}")
    if kind == "dataset" and has_magic(text):
        for folder in folders:
            if glob(str(folder / path), recursive=True):
                return str((folder / path).absolute())
        raise FileNotFoundError(f"no file has a name like {shorten(text)}")
    name = text.partition(":")[0] if kind == "dataset" else text
    if kind == "dataset" and name in ROW_GENERATORS:
        return text
    if kind != "template" and len(name) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(name):
        is_folder = any(os.path.isdir(folder / name.split("/")[0]) for folder in folders)
        if not is_folder and Path(name).suffix not in _DATA_SUFFIXES:
            return text
    remark = _near_path_remark(path, folders)
    if kind == "model" and runs and not remark:
        remark = did_you_mean(text, run_names(runs))
    if not remark and kind != "template":
        remark = "; a hub name is organisation/name"
    raise FileNotFoundError(f"no file or folder {shorten(text)}{remark}")


def _find_weights(path: Path, folders: list[Path]) -> Path | None:
    """Return the first model folder at `path` in one of `folders`; for a run or checkpoint, that of its weights."""
    for folder in folders:
        if names_weights(folder / path):
            return exported_weights(folder / path)
    return None


def _module_file(module: str, folders: list[Path]) -> Path | None:
    """Return the file of a module in one of `folders`; None if Python's own search must find the module.

    This is so for a module of a package in the current directory, which is on the Python path.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    relative = Path(*parts).with_suffix(".py")
    if len(parts) > 1 and os.path.isfile(relative):
        return None
    return next((folder / relative for folder in folders if os.path.isfile(folder / relative)), None)


def _near_path_remark(path: Path, folders: list[Path]) -> str:
    for folder in folders:
        names: list[str] = []
        with suppress(OSError, ValueError):
            names = os.listdir((folder / path).parent)
        if near_names := get_close_matches(path.name, names, n=1, cutoff=0.6):
            return f"; did you mean {path.parent / near_names[0]}?"
    return ""
