"""Finding of weights by folder layout: of a model, an adapter, or a run (RUN/checkpoints/step_N/{state.json, hf/}).

A run stands for its newest checkpoint, as in `rlctl eval`. Only a checkpoint's state.json is read.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object

# Prefix of a damaged checkpoint's folder that a resume has renamed.
DAMAGED = "damaged_"
_STATE = "state.json"
# PEFT's file name.
ADAPTER_CONFIG = "adapter_config.json"
_CHAT_FILES = ("tokenizer_config.json", "generation_config.json")


def is_run(path: Path) -> bool:
    """Return True if `path` is the directory of a run."""
    return os.path.isfile(path / "config.yaml") or os.path.isfile(path / "events.jsonl")


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is the folder of one checkpoint."""
    return os.path.isfile(path / _STATE)


def local_folder(model: str) -> Path | None:
    """Return the local folder of a model or adapter, given as a path or as a cached hub name; None if there is none."""
    folder = Path(model)
    # Path.is_dir would raise for an impossible file name.
    if os.path.isdir(folder):
        return folder
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    reference = cache / "refs/main"
    return cache / "snapshots" / reference.read_text().strip() if os.path.isfile(reference) else None


def local_adapter(model: str) -> Path | None:
    """Return the local folder of an adapter; None for a whole model, or without a local folder."""
    folder = local_folder(model)
    return folder if folder is not None and is_adapter(folder) else None


def chat_folder(model: str) -> str:
    """Return the folder or hub name that has a model's tokenizer, chat template and end tokens.

    For an adapter it is the adapter's folder if that has these files (as rlctl writes it), else the base model's.
    """
    adapter = local_adapter(model)
    if adapter is None or all(os.path.isfile(adapter / name) for name in _CHAT_FILES):
        return str(adapter or model)
    base = base_of(adapter)
    return str(local_folder(base) or base) if base and local_adapter(base) is None else model


def is_model(path: Path) -> bool:
    """Return True if `path` is a Hugging Face model folder or a PEFT adapter folder."""
    return os.path.isfile(path / "config.json") or is_adapter(path)


def is_adapter(path: Path) -> bool:
    """Return True if `path` is a PEFT adapter folder without a whole model in it."""
    has_model = any(os.path.isfile(path / name) for name in ("model.safetensors", "model.safetensors.index.json"))
    return os.path.isfile(path / ADAPTER_CONFIG) and not has_model


def base_of(adapter: Path) -> str:
    """Return the folder or hub name of an adapter's base model; empty if the adapter's config cannot be read."""
    with suppress(ModelError, ValueError):
        base = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str):
            return ""
        return base if os.path.isdir(base) or not os.path.isdir(adapter / base) else str(adapter / base)
    return ""


def names_weights(path: Path) -> bool:
    """Return True if `path` is a model or adapter folder, a checkpoint or a run."""
    return is_model(path) or is_checkpoint(path) or is_run(path)


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs in `folder`."""
    with suppress(OSError, ValueError):
        return sorted(path.name for path in folder.iterdir() if is_run(path))
    return []


def exported_weights(path: Path) -> Path:
    """Return the exported Hugging Face folder of a checkpoint, or of a run's newest one. Return any other path
    unchanged.

    Raises FileNotFoundError with a line for the user if there is no exported folder.
    """
    if is_model(path) or not (is_checkpoint(path) or is_run(path)):
        return path
    checkpoint = path if is_checkpoint(path) else _newest_checkpoint(path)
    if not is_model(checkpoint / "hf"):
        if not is_checkpoint(checkpoint):
            # A live run has just deleted this checkpoint and saved a newer one.
            return exported_weights(path)
        raise FileNotFoundError(f"{checkpoint} has no hf/ folder: its run had checkpoint.export=false")
    return checkpoint / "hf"


def checkpoint_folders(checkpoints: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """Return (step, folder) for each folder named `prefix` plus step_N, the lowest step first."""
    names = ((re.fullmatch(rf"{prefix}step_(\d+)", path.name), path) for path in checkpoints.glob(f"{prefix}step_*"))
    return sorted((int(name[1]), path) for name, path in names if name and path.is_dir())


def newest_folder(checkpoints: Path) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint, which may be damaged; None if there is none.

    A damaged checkpoint that a resume has renamed counts until a newer one is saved.
    """
    folders = checkpoint_folders(checkpoints)
    saved_ns = max((_modified_ns(path / _STATE) for _, path in folders), default=0)
    set_aside = checkpoint_folders(checkpoints, DAMAGED)
    unreplaced = [(step, path) for step, path in set_aside if _modified_ns(path) >= saved_ns]
    return max(folders + unreplaced, default=None)


def _modified_ns(path: Path) -> int:
    """Return the time of the last change in nanoseconds; 0 for a missing path."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _newest_checkpoint(run: Path) -> Path:
    """Return a run's newest checkpoint. Raises FileNotFoundError if there is none, or if the newest is damaged."""
    checkpoints = run / "checkpoints"
    step_and_folder = newest_folder(checkpoints)
    if step_and_folder is None:
        raise FileNotFoundError(f"{run} is a run without a checkpoint: it has no weights yet")
    step, newest = step_and_folder
    if not newest.name.startswith(DAMAGED) and _has_state(newest, step):
        return newest
    if newest_folder(checkpoints) != step_and_folder:
        # A live run has just deleted this checkpoint and saved a newer one.
        return _newest_checkpoint(run)
    readable = [path for step, path in checkpoint_folders(checkpoints) if path != newest and _has_state(path, step)]
    remedy = f"; the one before: {readable[-1]}" if readable else ""
    raise FileNotFoundError(f"{newest}, the newest checkpoint, is damaged{remedy}")


def _has_state(checkpoint: Path, step: int) -> bool:
    """Return True if a checkpoint's state.json can be read and is of this step."""
    try:
        return bool(json.loads((checkpoint / _STATE).read_text())["step"] == step)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
