"""PEFT's folders of adapters, read and written: adapter_config.json and adapter_model.safetensors.

A folder names its base model. Its tensors are PEFT's: `base_model.model.`, the module's name, `lora_A.weight`. Where
the base is a text model inside a vision-language one, modules have the names that they have there. torch is imported by
the functions that read or write tensors alone.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object, real_number, whole_number
from rlctl.config.run_weights import ADAPTER_CONFIG, base_of, is_adapter
from rlctl.models.adapters import LORA_A, LORA_B, AdapterSpec, AdapterTensor, text_name
from rlctl.models.layer_kinds import LinearLayer
from rlctl.models.weight_headers import file_header

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.models.hf_folder import WeightFiles
    from rlctl.models.parameter_table import TensorRow

WEIGHTS = "adapter_model.safetensors"
_NEEDED = ("peft_type", "base_model_name_or_path", "r", "lora_alpha")
# Largest rank and alpha; published ones are below 10,000.
_LARGEST_RANK = 1_000_000
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
# File with the digest of the base's weights. The metadata of safetensors has no fixed order: equal adapters would be
# unequal files.
_BASE = "rlctl_base.json"
# Key of `digest_of_weights` there. Earlier folders have `digest`, of both ends of the files alone: it is not compared.
_DIGEST = "sampled"


@dataclass(frozen=True)
class AdapterConfig:
    """Contents of adapter_config.json."""

    # Folder or hub name of the model that it adapts.
    base: str
    rank: int
    alpha: float
    rslora: bool
    dropout: float


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter's folder. Raises ModelError for one that is no plain LoRA."""
    file = folder / ADAPTER_CONFIG
    raw = read_object(file)
    if lacking := [key for key in _NEEDED if key not in raw]:
        raise ModelError(f"{file} has no {lacking[0]}; needed: PEFT's config of a LoRA adapter")
    if raw["peft_type"] != "LORA":
        raise ModelError(f"{file}: peft_type is {json.dumps(raw['peft_type'])}; rlctl has LORA alone")
    rank = whole_number(raw["r"], f"{file}: r", 1, _LARGEST_RANK)
    alpha = real_number(raw["lora_alpha"], f"{file}: lora_alpha", 0.0, _LARGEST_RANK)
    dropout = real_number(raw.get("lora_dropout") or 0.0, f"{file}: lora_dropout", 0.0, 1.0)
    rslora = raw.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise ModelError(f"{file}: use_rslora is {json.dumps(rslora)}; allowed: true, false")
    base = base_of(folder)
    for key, plain in _PLAIN.items():
        if raw.get(key) not in plain:
            raise ModelError(f"{file}: {key} is {json.dumps(raw[key])}; rlctl has plain LoRA of linear layers alone")
    if not base:
        raise ModelError(f"{file}: base_model_name_or_path names no model")
    return AdapterConfig(base=base, rank=rank, alpha=alpha, rslora=rslora, dropout=dropout)


def base_digest(folder: Path) -> str | None:
    """Return the digest of the weights that the adapter was trained on, if rlctl wrote it."""
    with suppress(ModelError, KeyError):
        return str(read_object(folder / _BASE)[_DIGEST])
    return None


def read_spec(folder: Path, linears: Sequence[LinearLayer]) -> AdapterSpec:
    """Return the adapters of a folder for a model with these linear layers.

    Raises ModelError for a tensor without a place in the model, or of another shape.
    """
    config = read_config(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: adapters are read from safetensors only")
    header = file_header(file)
    name_on_disk = {text_name(name.removeprefix(_PREFIX)): name for name in header}
    shapes = {name: tuple(header[on_disk]["shape"]) for name, on_disk in name_on_disk.items()}
    adapted_names = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in shapes}
    spec = AdapterSpec(
        rank=config.rank,
        alpha=config.alpha,
        rslora=config.rslora,
        dropout=config.dropout,
        targets=tuple(linear for linear in linears if linear.name in adapted_names),
    )
    expected_shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    for name in sorted({*shapes, *expected_shapes}):
        if name not in expected_shapes:
            raise ModelError(f"{file}: {name_on_disk[name]} has no linear layer in {config.base}")
        if shapes.get(name) != expected_shapes[name]:
            raise ModelError(f"{file}: {name} has shape {shapes.get(name)}, expected {expected_shapes[name]}")
    return spec


class AdapterFile:
    """Tensors of an adapter's folder, by the names of `AdapterTensor`."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._names = {text_name(name.removeprefix(_PREFIX)): name for name in file_header(folder / WEIGHTS)}
        self._file: Any = safe_open(folder / WEIGHTS, framework="pt")

    def tensor(self, name: str) -> "Tensor":
        """Return a whole tensor, float32. Raises KeyError."""
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor.float()

    def read_into(self, rows: "Iterable[TensorRow]", target: "Tensor") -> None:
        """Fill `target`, a whole parameter, from its row."""
        for row in rows:
            target.copy_(self.tensor(row.name))


def check_trainable(folder: Path, spec: AdapterSpec) -> None:
    """Raise ModelError for a layer whose A and B are all zero: neither would ever have a gradient."""
    file = AdapterFile(folder)
    for target in spec.targets:
        if not file.tensor(target.name + LORA_A).any() and not file.tensor(target.name + LORA_B).any():
            problem = f"A and B of {target.name} are all zero, so that neither has a gradient"
            raise ModelError(f"{folder / WEIGHTS}: {problem}; allowed: one of them zero")


def open_weights(folder: Path) -> "AdapterFile | WeightFiles":
    """Return the tensors of an adapter's folder, or of a model's. Raises as `WeightFiles`."""
    from rlctl.models.hf_folder import WeightFiles

    return AdapterFile(folder) if is_adapter(folder) else WeightFiles(folder)


def write_adapter(
    folder: Path,
    spec: AdapterSpec,
    linears: Sequence[LinearLayer],
    base: str,
    digest: str,
    tensors: Iterable[tuple[AdapterTensor, "Tensor"]],
    place: tuple[str, str] = ("", ""),
) -> None:
    """Write a folder that PEFT, transformers and vLLM load.

    base: the model's folder or hub name. place: see `meta_model.text_in_whole`. Raises OSError.
    """
    from rlctl.models.hf_folder import save_tensors

    text_prefix, whole_prefix = place

    def rename(name: str) -> str:
        return whole_prefix + name.removeprefix(text_prefix)

    if text_prefix == whole_prefix:
        target_modules = _shortest_names(spec, linears)
    else:
        target_modules = [rename(target.name) for target in spec.targets]
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
        "target_modules": target_modules,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    host_tensors = {}
    for adapter, tensor in tensors:
        host_tensors[_PREFIX + rename(adapter.name)] = tensor.detach().to("cpu", copy=True).contiguous()
    (folder / _BASE).write_text(json.dumps({"name": base, _DIGEST: digest}, indent=2) + "\n")
    save_tensors(host_tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)


def _shortest_names(spec: AdapterSpec, linears: Sequence[LinearLayer]) -> list[str]:
    """Return the targets' last names where these name no other linear layer, else their whole names."""
    names = {target.name for target in spec.targets}
    last_names = {name.rpartition(".")[2] for name in names}
    for linear in linears:
        if linear.name not in names and linear.name.rpartition(".")[2] in last_names:
            return sorted(names)
    return sorted(last_names)
