"""PEFT's folders of adapters, read and written: adapter_config.json and adapter_model.safetensors.

A folder names its base model. Its tensors are PEFT's: `base_model.model.`, the module's name, `lora_A.weight`. torch is
imported by the functions that read or write tensors alone.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.errors import ModelError
from rlctl.models.adapters import LORA_A, LORA_B, AdapterSpec, AdapterTensor
from rlctl.models.layer_kinds import LinearLayer
from rlctl.models.weight_headers import file_header, file_metadata

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys of adapter_config.json that change the product, with the values that leave it as it is.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None,),
    # Others shift the base, or cost a decomposition of it.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}
# Digest of the base's weights in the metadata of the file.
_DIGEST = "base_digest"


@dataclass(frozen=True)
class AdapterConfig:
    """Contents of adapter_config.json."""

    # Folder or hub name of the model that it adapts.
    base: str
    rank: int
    alpha: float
    rslora: bool
    dropout: float


def is_adapter(folder: Path) -> bool:
    """Return True if `folder` holds an adapter."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter's folder. Raises ModelError for one that is no plain LoRA."""
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["peft_type"] != "LORA":
            raise ModelError(f"{file}: peft_type is {raw['peft_type']}; rlctl has LORA alone")
        base, rank, alpha = str(raw["base_model_name_or_path"]), int(raw["r"]), float(raw["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"is no adapter's config: {error}"
        raise ModelError(f"{file} {what}") from error
    for key, plain in _PLAIN.items():
        if raw.get(key) not in plain:
            raise ModelError(f"{file}: {key} is {json.dumps(raw[key])}; rlctl has plain LoRA of linear layers alone")
    return AdapterConfig(base, rank, alpha, bool(raw.get("use_rslora")), float(raw.get("lora_dropout") or 0.0))


def base_digest(folder: Path) -> str | None:
    """Return the digest of the weights that the adapter was trained on, if rlctl wrote it."""
    return file_metadata(folder / WEIGHTS).get(_DIGEST)


def read_spec(folder: Path, linears: Sequence[LinearLayer]) -> AdapterSpec:
    """Return the adapters of a folder for a model with these linear layers.

    Raises ModelError for a tensor without a place in the model, or of another shape.
    """
    config, file = read_config(folder), folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: adapters are read from safetensors only")
    found = {name: tuple(entry["shape"]) for name, entry in file_header(file).items()}
    names = {name.removeprefix(_PREFIX).removesuffix(LORA_A).removesuffix(LORA_B) for name in found}
    targets = tuple(each for each in linears if each.name in names)
    spec = AdapterSpec(config.rank, config.alpha, config.rslora, config.dropout, targets)
    expected = {_PREFIX + each.name: each.shape for each in spec.tensors}
    for name in sorted({*found, *expected}):
        if name not in expected:
            raise ModelError(f"{file}: {name} has no linear layer in {config.base}")
        if found.get(name) != expected[name]:
            raise ModelError(f"{file}: {name} has shape {found.get(name)}, expected {expected[name]}")
    return spec


class AdapterFile:
    """Tensors of an adapter's folder, by the names of `AdapterTensor`."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(folder / WEIGHTS, framework="pt")

    def tensor(self, name: str) -> "Tensor":
        """Return a whole tensor, float32."""
        value: Tensor = self._file.get_tensor(_PREFIX + name)
        return value.float()


def write_adapter(
    folder: Path,
    spec: AdapterSpec,
    linears: Sequence[LinearLayer],
    base: str,
    digest: str,
    tensors: Iterable[tuple[AdapterTensor, "Tensor"]],
) -> None:
    """Write a folder that PEFT, transformers and vLLM load. base: the model's folder or hub name. Raises OSError."""
    from rlctl.models.hf_folder import save_tensors

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": _shortest(spec, linears),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    held = {_PREFIX + each.name: value.detach().to("cpu", copy=True).contiguous() for each, value in tensors}
    save_tensors(held, folder / WEIGHTS, {_DIGEST: digest})
    (folder / WEIGHTS).chmod(0o644)


def _shortest(spec: AdapterSpec, linears: Sequence[LinearLayer]) -> list[str]:
    """Return the targets' last names where these name no other linear layer, else their whole names."""
    last = {each.name.rpartition(".")[2] for each in spec.targets}
    chosen = {each.name for each in spec.targets}
    if all(each.name in chosen for each in linears if each.name.rpartition(".")[2] in last):
        return sorted(last)
    return sorted(chosen)
