"""Weights by the layout of folders: a model's, an adapter's, a run's (RUN/checkpoints/step_N/{state.json, hf/}).

A run is its newest checkpoint, here as in `rlctl eval`. Nothing is read but the state of a checkpoint.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object

# Before the name of a checkpoint that a resume set aside.
DAMAGED = "damaged_"
_STATE = "state.json"
# PEFT's name.
ADAPTER_CONFIG = "adapter_config.json"
_CHAT_FILES = ("tokenizer_config.json", "generation_config.json")


def is_run(path: Path) -> bool:
    """Return True if `path` is the directory of a run."""
    return os.path.isfile(path / "config.yaml") or os.path.isfile(path / "events.jsonl")


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is the folder of one checkpoint."""
    return os.path.isfile(path / _STATE)


def local_folder(model: str) -> Path | None:
    """Return the folder of a model or adapter, or of a hub name in the local hub cache; None if there is no folder."""
    folder = Path(model)
    # Path.is_dir would raise for a text that cannot name a file.
    if os.path.isdir(folder):
        return folder
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    reference = cache / "refs/main"
    return cache / "snapshots" / reference.read_text().strip() if os.path.isfile(reference) else None


def local_adapter(model: str) -> Path | None:
    """Return `local_folder` of an adapter; None for a whole model, and if there is no folder."""
    folder = local_folder(model)
    return folder if folder is not None and is_adapter(folder) else None


def chat_folder(model: str) -> str:
    """Return the folder or hub name of a model's tokenizer, chat template and end tokens.

    It is the adapter's own folder if that has all these files, as rlctl writes it, else the base model's.
    """
    adapter = local_adapter(model)
    if adapter is None or all(os.path.isfile(adapter / name) for name in _CHAT_FILES):
        return str(adapter or model)
    base = base_of(adapter)
    return str(local_folder(base) or base) if base and local_adapter(base) is None else model


def is_model(path: Path) -> bool:
    """Return True if `path` is a Hugging Face folder, or PEFT's folder of an adapter."""
    return os.path.isfile(path / "config.json") or is_adapter(path)


def is_adapter(path: Path) -> bool:
    """Return True if `path` is PEFT's folder of an adapter without a model in it."""
    has_model = any(os.path.isfile(path / name) for name in ("model.safetensors", "model.safetensors.index.json"))
    return os.path.isfile(path / ADAPTER_CONFIG) and not has_model


def base_of(adapter: Path) -> str:
    """Return the folder or hub name of the model that an adapter is for; empty if its config cannot be read."""
    with suppress(ModelError, ValueError):
        base = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str):
            return ""
        return base if os.path.isdir(base) or not os.path.isdir(adapter / base) else str(adapter / base)
    return ""


def names_weights(path: Path) -> bool:
    """Return True if `path` is a Hugging Face folder, a checkpoint or a run."""
    return is_model(path) or is_checkpoint(path) or is_run(path)


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs in `folder`."""
    with suppress(OSError, ValueError):
        return sorted(path.name for path in folder.iterdir() if is_run(path))
    return []


def exported_weights(path: Path) -> Path:
    """Return the Hugging Face folder of a run's newest checkpoint, or of a checkpoint; any other path as it is.

    Raises FileNotFoundError with a line for the user if a run or a checkpoint has no such folder.
    """
    if is_model(path) or not (is_checkpoint(path) or is_run(path)):
        return path
    checkpoint = path if is_checkpoint(path) else _newest_checkpoint(path)
    if not is_model(checkpoint / "hf"):
        if not is_checkpoint(checkpoint):
            # A run that still trains has pruned this checkpoint since, and saved another.
            return exported_weights(path)
        raise FileNotFoundError(f"{checkpoint} has no hf/ folder: its run had checkpoint.export=false")
    return checkpoint / "hf"


def checkpoint_folders(checkpoints: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """Return (step, folder) of each folder that is named like a checkpoint, after `prefix`, the oldest first."""
    names = ((re.fullmatch(rf"{prefix}step_(\d+)", path.name), path) for path in checkpoints.glob(f"{prefix}step_*"))
    return sorted((int(name[1]), path) for name, path in names if name and path.is_dir())


def newest_folder(checkpoints: Path) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint, which may be damaged; None for none.

    A checkpoint that a resume set aside counts until another is saved.
    """
    folders = checkpoint_folders(checkpoints)
    saved_ns = max((_modified_ns(path / _STATE) for _, path in folders), default=0)
    set_aside = checkpoint_folders(checkpoints, DAMAGED)
    unreplaced = [(step, path) for step, path in set_aside if _modified_ns(path) >= saved_ns]
    return max(folders + unreplaced, default=None)


def _modified_ns(path: Path) -> int:
    """Return the time of the last change, in nanoseconds; 0 for a path that is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises FileNotFoundError if the run has none, or the newest is damaged."""
    checkpoints = run / "checkpoints"
    step_and_folder = newest_folder(checkpoints)
    if step_and_folder is None:
        raise FileNotFoundError(f"{run} is a run without a checkpoint: it has no weights yet")
    step, newest = step_and_folder
    if not newest.name.startswith(DAMAGED) and _has_state(newest, step):
        return newest
    if newest_folder(checkpoints) != step_and_folder:
        # A run that still trains has pruned this checkpoint since, and saved another.
        return _newest_checkpoint(run)
    readable = [path for step, path in checkpoint_folders(checkpoints) if path != newest and _has_state(path, step)]
    remedy = f"; the one before: {readable[-1]}" if readable else ""
    raise FileNotFoundError(f"{newest}, the newest checkpoint, is damaged{remedy}")


def _has_state(checkpoint: Path, step: int) -> bool:
    """Return True if the state of a checkpoint can be read and is of this step."""
    try:
        return bool(json.loads((checkpoint / _STATE).read_text())["step"] == step)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
