"""Reading and writing of PEFT's adapter folders: adapter_config.json and adapter_model.safetensors.

A folder names its base model. A tensor's name is PEFT's: `base_model.model.`, the module's name, `.lora_A.weight`. If
the base is a vision-language model, the module names are those of the whole model. Only functions that read or write
tensors import torch.
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
# Largest allowed rank and alpha. Published adapters have values below 10,000.
_LARGEST_RANK = 1_000_000
_PREFIX = "base_model.model."
# Key of adapter_config.json -> its values with plain LoRA. Other values change how an adapter is computed, and are
# refused.
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
    # Other initializations change the base weights, or need their decomposition.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}
# File with the digest of the base's weights. It is no metadata of the safetensors file, because metadata has no fixed
# order, and equal adapters would give different files.
_BASE = "rlctl_base.json"
# Key of the digest in `_BASE`, see `digest_of_weights`. The key `digest` of older folders is ignored: it covers only
# both ends of each file.
_DIGEST = "sampled"


@dataclass(frozen=True)
class AdapterConfig:
    """Contents of adapter_config.json."""

    # Folder or hub name of the base model.
    base: str
    rank: int
    alpha: float
    rslora: bool
    dropout: float


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter folder. Raises ModelError if the adapter is no plain LoRA."""
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
    """Return the digest of the base weights that the adapter was trained on; None if rlctl did not write the folder."""
    with suppress(ModelError, KeyError):
        return str(read_object(folder / _BASE)[_DIGEST])
    return None


def read_spec(folder: Path, linears: Sequence[LinearLayer]) -> AdapterSpec:
    """Return the spec of the adapters in a folder, for a model with these linear layers.

    Raises ModelError for a tensor that has no linear layer in the model, or another shape.
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
    """Tensors of an adapter folder, read by the names of `AdapterTensor`."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._names = {text_name(name.removeprefix(_PREFIX)): name for name in file_header(folder / WEIGHTS)}
        self._file: Any = safe_open(folder / WEIGHTS, framework="pt")

    def tensor(self, name: str) -> "Tensor":
        """Return a whole tensor as float32. Raises KeyError."""
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor.float()

    def read_into(self, rows: "Iterable[TensorRow]", target: "Tensor") -> None:
        """Fill `target`, a whole parameter, with the tensor of its row."""
        for row in rows:
            target.copy_(self.tensor(row.name))


def check_trainable(folder: Path, spec: AdapterSpec) -> None:
    """Raise ModelError for a layer whose A and B are both all zero, because neither would ever get a gradient."""
    file = AdapterFile(folder)
    for target in spec.targets:
        if not file.tensor(target.name + LORA_A).any() and not file.tensor(target.name + LORA_B).any():
            problem = f"A and B of {target.name} are all zero, so that neither has a gradient"
            raise ModelError(f"{folder / WEIGHTS}: {problem}; allowed: one of them zero")


def open_weights(folder: Path) -> "AdapterFile | WeightFiles":
    """Open the tensors of an adapter folder or of a model folder. Raises ModelError like `WeightFiles`."""
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
    """Write an adapter folder that PEFT, transformers and vLLM can load.

    base: folder or hub name of the base model. digest: of its weights. place: prefixes of module names, see
    `meta_model.text_in_whole`. Raises OSError.
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
    """Return names for `target_modules`: last parts such as q_proj if they match no other linear layer, else full
    names.
    """
    names = {target.name for target in spec.targets}
    last_names = {name.rpartition(".")[2] for name in names}
    for linear in linears:
        if linear.name not in names and linear.name.rpartition(".")[2] in last_names:
            return sorted(names)
    return sorted(last_names)
