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
        if not isinstance(part, dict):
            continue
        for key, count in part.items():
            if _COUNTS.search(key) and isinstance(count, int | float) and count > _MOST_PARTS:
                raise ModelError(f"{file}: {key} is {count:g}; allowed: at most {_MOST_PARTS:,}")
        if problem := _quantisation_problem(part) or _rope_problem(part):
            raise ModelError(f"{file}: {problem}")


def _quantisation_problem(raw: dict[str, Any]) -> str | None:
    """Return the problem with weights that config.json calls quantised."""
    key = next((name for name in ("quantization_config", "compression_config") if raw.get(name)), None)
    if key is None:
        return None
    quantisation = raw[key] if isinstance(raw[key], dict) else {}
    bits = next(
        (size for size in (4, 8) if quantisation.get(f"load_in_{size}bit")),
        quantisation.get("bits") or quantisation.get("w_bit"),
    )
    method = str(quantisation.get("quant_method") or quantisation.get("quant_type") or "quantised")
    precision = f"{method}, {bits} bits" if bits else method
    advice = "use the checkpoint that it was quantised from (its name without -FP8, -AWQ or the like)"
    return f"{key} says {precision}: rlctl does not train quantised weights; {advice}"


def _rope_problem(raw: dict[str, Any]) -> str | None:
    """Return the problem with a rotary scale. The scale must turn a token alone as in a pack."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        return None
    # One scale, or one for each kind of layer.
    scales = [scaling, *(scale for scale in scaling.values() if isinstance(scale, dict))]
    kinds = {str(scale.get("rope_type") or scale.get("type") or "default") for scale in scales}
    if odd_kinds := sorted(kinds - set(ROPE_TYPES)):
        allowed = ", ".join(ROPE_TYPES)
        return f"rope_type {odd_kinds[0]}: must be one of {allowed}, which turn a token the same in any pack"
    return None
