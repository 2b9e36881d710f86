"""Weights of runs and checkpoints by the layout of a run directory: RUN/checkpoints/step_N/{state.json, hf/}.

A run is its newest checkpoint, here as in `rlctl eval`. Nothing is read but the state of a checkpoint.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

_CHECKPOINT = re.compile(r"step_(\d+)")
_STATE = "state.json"
# PEFT's name.
ADAPTER_CONFIG = "adapter_config.json"


def is_run(path: Path) -> bool:
    """Return True if `path` is the directory of a run."""
    return os.path.isfile(path / "config.yaml") or os.path.isfile(path / "events.jsonl")


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is the folder of one checkpoint."""
    return os.path.isfile(path / _STATE)


def is_model(path: Path) -> bool:
    """Return True if `path` is a Hugging Face folder, or PEFT's of an adapter."""
    return os.path.isfile(path / "config.json") or is_adapter(path)


def is_adapter(path: Path) -> bool:
    """Return True if `path` is PEFT's folder of an adapter without a model in it."""
    has_model = any(os.path.isfile(path / name) for name in ("model.safetensors", "model.safetensors.index.json"))
    return os.path.isfile(path / ADAPTER_CONFIG) and not has_model


def base_of(adapter: Path) -> str:
    """Return the folder or hub name of the model that an adapter is for; empty if its config cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        base = str(json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"])
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

    Raises FileNotFoundError with a line for the user if a run or a checkpoint has none.
    """
    if is_model(path) or not (is_checkpoint(path) or is_run(path)):
        return path
    checkpoint = path if is_checkpoint(path) else _newest(path)
    if checkpoint is None:
        raise FileNotFoundError(f"{path} is a run without a checkpoint: it has no weights yet")
    if not is_model(checkpoint / "hf"):
        raise FileNotFoundError(f"{checkpoint} has no hf/ folder: its run had checkpoint.export=false")
    return checkpoint / "hf"


def _newest(run: Path) -> Path | None:
    steps = {path: _step(path) for path in (run / "checkpoints").glob("step_*")}
    return max((path for path in steps if steps[path] >= 0), key=lambda path: steps[path], default=None)


def _step(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its name, -1 if its state cannot be read or is of another step."""
    named = _CHECKPOINT.fullmatch(checkpoint.name)
    try:
        step = int(named[1]) if named else -1
        return step if json.loads((checkpoint / _STATE).read_text())["step"] == step else -1
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1
