"""config.json of a model folder, read without torch: where it is, what in it rlctl does not train, and its sizes."""

import re
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import base_of, is_adapter, local_adapter, local_folder
from rlctl.models.facts import ModelSizes, find_facts, known_facts

# Rotary scales that turn a token the same alone and in a pack of many. transformers' dynamic and longrope follow the
# longest sequence of a batch, vLLM's a fixed length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

# Keys of numbers of parts that are built one by one, and the most of each.
_COUNTS = re.compile(r"(layer|layers|expert|experts|head|heads|blocks)$")
_MOST_PARTS = 100_000


def config_file(model: str) -> Path | None:
    """Return the config.json of a model folder, or of a hub name in the local hub cache; None when it is not here.

    An adapter has that of its base.
    """
    folder = local_folder(model)
    if folder is not None and is_adapter(folder):
        base = base_of(folder)
        return config_file(base) if base and local_adapter(base) is None else None
    return folder / "config.json" if folder is not None and (folder / "config.json").is_file() else None


def sizes_of(model: str) -> ModelSizes | None:
    """Return the sizes of a model folder or hub name; None when it is not here, or its facts are not known yet.

    Raises ModelError as `check_config`.
    """
    file = config_file(model)
    if file is None:
        return None
    check_config(file)
    facts = known_facts(file.parent)
    return facts.sizes if facts else None


def read_sizes(file: Path) -> ModelSizes:
    """Return the sizes of the model whose config.json this is; derive its facts if they are new.

    Raises ModelError as `check_config` and `find_facts`.
    """
    check_config(file)
    return find_facts(file.parent).sizes


def check_config(file: Path) -> None:
    """Raise ModelError for a config.json that is missing, no JSON, of quantised weights, or with an odd scale."""
    raw = read_object(file)
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{file} has no model_type; needed: a Hugging Face model's config.json")
    for part in (raw, raw.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():
            if _COUNTS.search(key) and isinstance(value, int | float) and value > _MOST_PARTS:
                raise ModelError(f"{file}: {key} is {value:g}; allowed: at most {_MOST_PARTS:,}")
        if isinstance(part, dict) and (why := _quantised(part) or _rope(part)):
            raise ModelError(f"{file}: {why}")


def _quantised(raw: dict[str, Any]) -> str | None:
    """Return the problem with weights that config.json calls quantised."""
    key = next((name for name in ("quantization_config", "compression_config") if raw.get(name)), None)
    if key is None:
        return None
    found = raw[key] if isinstance(raw[key], dict) else {}
    bits = next((size for size in (4, 8) if found.get(f"load_in_{size}bit")), found.get("bits") or found.get("w_bit"))
    method = str(found.get("quant_method") or found.get("quant_type") or "quantised")
    what = f"{method}, {bits} bits" if bits else method
    advice = "use the checkpoint that it was quantised from (its name without -FP8, -AWQ or the like)"
    return f"{key} says {what}: rlctl does not train quantised weights; {advice}"


def _rope(raw: dict[str, Any]) -> str | None:
    """Return the problem with a rotary scale. It must turn a token alone as in a pack."""
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    found = found if isinstance(found, dict) else {}
    # One scale, or one for each kind of layer.
    each = [found, *(part for part in found.values() if isinstance(part, dict))]
    kinds = {str(part.get("rope_type") or part.get("type") or "default") for part in each}
    if odd := sorted(kinds - set(ROPE_TYPES)):
        known = ", ".join(ROPE_TYPES)
        return f"rope_type {odd[0]}: must be one of {known}, which turn a token the same whatever it is packed with"
    return None
