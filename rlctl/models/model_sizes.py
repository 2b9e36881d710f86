"""Reading of a model's config.json without torch: finding it, refusing unsupported values, and getting the sizes."""

import re
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import base_of, is_adapter, local_adapter, local_folder
from rlctl.models.facts import ModelSizes, find_facts, known_facts

# Rotary scalings with the same angles for a sequence alone and in a pack. dynamic and longrope depend on the longest
# sequence of a batch in transformers, and on a fixed length in vLLM.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

# Keys with numbers of modules that are built one by one, and the largest allowed number.
_COUNTS = re.compile(r"(layer|layers|expert|experts|head|heads|blocks)$")
_MOST_PARTS = 100_000


def config_file(model: str) -> Path | None:
    """Return the config.json of a model folder or cached hub model; None if it is not on this machine.

    For an adapter it is the base's.
    """
    folder = local_folder(model)
    if folder is not None and is_adapter(folder):
        base = base_of(folder)
        return config_file(base) if base and local_adapter(base) is None else None
    return folder / "config.json" if folder is not None and (folder / "config.json").is_file() else None


def sizes_of(model: str) -> ModelSizes | None:
    """Return the sizes of a model folder or hub name; None if it is not on this machine, or its facts are not derived
    yet.

    Raises ModelError like `check_config`.
    """
    file = config_file(model)
    if file is None:
        return None
    check_config(file)
    facts = known_facts(file.parent)
    return facts.sizes if facts else None


def read_sizes(file: Path) -> ModelSizes:
    """Return the sizes of the model with this config.json. Derive its facts if they are not cached.

    Raises ModelError as `check_config` and `find_facts`.
    """
    check_config(file)
    return find_facts(file.parent).sizes


def check_config(file: Path) -> None:
    """Raise ModelError for a config.json that is missing or no JSON, or has quantised weights or an unsupported rotary
    scaling.
    """
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
    """Return the problem if config.json says that the weights are quantised, else None."""
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
    """Return the problem of a rotary scaling whose angles depend on other sequences of a pack; None if it has none."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        return None
    # There is one scaling, or one for each kind of layer.
    scales = [scaling, *(scale for scale in scaling.values() if isinstance(scale, dict))]
    kinds = {str(scale.get("rope_type") or scale.get("type") or "default") for scale in scales}
    if odd_kinds := sorted(kinds - set(ROPE_TYPES)):
        allowed = ", ".join(ROPE_TYPES)
        return f"rope_type {odd_kinds[0]}: must be one of {allowed}, which turn a token the same in any pack"
    return None
