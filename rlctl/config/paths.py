"""The place of a path, or of a plugin's module, that a config names.

A path is looked up next to the YAML file that names it, then in the current directory, then among the shipped recipes
(a copied recipe still finds its model; not for modules), then on a hub. An existing path becomes absolute, so that a
resolved config runs from anywhere. `organisation/name` that is no file stays as it is, a hub name, unless
`organisation` is a folder here: then it is a mistyped path. A model may be a run, by its directory or its name, or a
checkpoint: the path becomes that of the exported weights.
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
# The hub's own bound is 96 for each half.
_LONGEST_HUB_NAME = 200
# Suffixes of files, never of a hub's name. Wider than `data.files.FILE_SUFFIXES`, which rlctl reads: the path of a
# missing file of another kind, like rows.txt, is no name of a data set on the hub either.
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv", ".gz", ".txt", ".yaml"}


def resolve(text: str, kind: str, origin: Origin, runs: Path | None = None) -> str:
    """Return the absolute path, or the hub name, that `text` means. Raises FileNotFoundError with a line for the user.

    kind: as `fields.spec` has them. runs: the folder in which a model is looked up as a run by its name.
    """
    folders = [Path.cwd(), RECIPES]
    if origin.file is not None:
        folders.insert(0, origin.file.parent)
    if kind == "plugin":
        module, _, function = text.rpartition(":")
        if module.endswith(".py"):
            return f"{resolve(module, 'template', origin)}:{function}"
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
        # Path.exists raises for an impossible name. A pipe or device has no end.
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
    """Return the first model in one of `folders`: a Hugging Face folder, or the weights of a run or checkpoint."""
    for folder in folders:
        if names_weights(folder / path):
            return exported_weights(folder / path)
    return None


def _module_file(module: str, folders: list[Path]) -> Path | None:
    """Return the file of a module in one of `folders`; None if the module is looked up on the Python path.

    Python finds a package's module in the current directory too, since that directory is on its path.
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
