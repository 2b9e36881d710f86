"""Sizes of one model folder, read from its config.json as plain JSON: dimensions, limits, number of parameters.

Parameters are counted by formula, exactly as transformers builds the architectures. So checks and memory forecasts need
neither torch nor the weights.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.models.architectures import ARCHITECTURES, ArchitectureRow, Flag

# Rotary scales that turn a token the same alone and in a pack of many. transformers' dynamic and longrope follow the
# longest sequence of a batch, vLLM's a fixed length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. Parameter counts are numbers, not bytes."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: int
    experts_per_token: int
    expert_intermediate: int
    # Layers whose MLP is a mixture of experts.
    sparse_layers: int
    activation: str
    norm_topk_prob: bool

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's q, k, v, o, their biases, and the norms of q and k."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = (q + 2 * kv) * self.qkv_bias + self.hidden * self.output_bias
        return self.hidden * (2 * q + 2 * kv) + bias + 2 * self.head_dim * self.qk_norm

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one layer's gate, up and down."""
        return 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias

    @property
    def sparse_mlp_parameters(self) -> int:
        """Parameters of one layer's experts and router."""
        return self.experts * (3 * self.expert_intermediate + 1) * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all layers' experts, without their routers."""
        return self.sparse_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, which FSDP gathers at a time."""
        mlp = self.sparse_mlp_parameters if self.sparse_layers else self.dense_mlp_parameters
        return self.attention_parameters + mlp + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding; the output has the same number unless tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings once."""
        dense = self.layers - self.sparse_layers
        mlp = dense * self.dense_mlp_parameters + self.sparse_layers * self.sparse_mlp_parameters
        layers = self.layers * (self.attention_parameters + 2 * self.hidden) + mlp
        return layers + self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: its own experts alone, and of the embeddings the output."""
        idle = self.expert_parameters // self.experts * (self.experts - self.experts_per_token) if self.experts else 0
        return self.parameters - idle - self.embedding_parameters * (not self.tied)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def config_file(model: str) -> Path | None:
    """Return the config.json of a model folder, or of a hub name in the local hub cache; None when it is not here."""
    folder = Path(model)
    # Path.is_dir would raise for a text that cannot name a file.
    if not os.path.isdir(folder):
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
        reference = cache / "refs/main"
        if not os.path.isfile(reference):
            return None
        folder = cache / "snapshots" / reference.read_text().strip()
    return folder / "config.json" if (folder / "config.json").is_file() else None


def sizes_of(model: str) -> ModelSizes | None:
    """Return the sizes of a model folder or hub name; None when its config.json is not here. Raises ModelError."""
    file = config_file(model)
    return read_sizes(file) if file else None


def read_sizes(file: Path) -> ModelSizes:
    """Return the sizes in a config.json.

    Raises ModelError: not JSON, a size missing, another kind of model, quantised, windows, an odd rotary scale.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    row = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if row is None:
        raise ModelError(f"model_type {kind} in {file}: must be one of {', '.join(ARCHITECTURES)}")
    try:
        if what := _quantised(raw) or _rope(raw) or _window(row, raw):
            raise ModelError(f"{file}: {what}")
        return _sizes(str(kind), row, raw)
    except KeyError as error:
        raise ModelError(f"{file} has no {error.args[0]}") from error
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: a size must be a whole number above 0: {error}") from error


def _sizes(kind: str, row: ArchitectureRow, raw: dict[str, Any]) -> ModelSizes:
    hidden, layers, heads = (_size(raw, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    experts = row.experts
    # llama3 and yarn have stretched max_position_embeddings already; linear stretches it by its factor. So do vLLM
    # (`_get_and_verify_max_len`) and transformers (`_compute_yarn_parameters`) read it.
    rope_type, scale = _rotary(raw)
    stretch = float(scale.get("factor") or 1) if rope_type == "linear" else 1
    return ModelSizes(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or (row.head_dim or hidden // heads),
        intermediate=_size(raw, "intermediate_size"),
        vocab=_size(raw, "vocab_size"),
        max_positions=int(_size(raw, "max_position_embeddings") * stretch),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_flag(raw, row.qkv_bias),
        output_bias=_flag(raw, row.output_bias),
        mlp_bias=_flag(raw, row.mlp_bias),
        qk_norm=row.qk_norm,
        experts=next(filter(None, map(raw.get, experts.number)), None) or raw[experts.number[-1]] if experts else 0,
        experts_per_token=raw.get(*experts.per_token) if experts else 0,
        expert_intermediate=raw.get(*experts.width) if experts else 0,
        sparse_layers=sum(row.sparse_layers(raw)),
        activation=str(raw.get("hidden_act", "silu")),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )


def _flag(raw: dict[str, Any], flag: Flag) -> bool:
    return bool(raw.get(flag, False)) if isinstance(flag, str) else flag


def _size(raw: dict[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"{name} is {value!r}")
    return value


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


def _window(row: ArchitectureRow, raw: dict[str, Any]) -> str | None:
    """Return the problem with attention to less than the whole sequence, as transformers 5.19 and vLLM read it.

    Raises KeyError without a num_hidden_layers that decides.
    """
    keys, listed = row.window, raw.get("layer_types")
    if keys.listed and listed:
        odd = sorted({str(each) for each in listed} - {"full_attention"})
        return f"layer_types has {odd[0]}, and rlctl trains full attention alone" if odd else None
    window = raw.get("sliding_window", keys.size)
    own_switch = keys.key != "sliding_window"
    if not window or (own_switch and not raw.get(keys.key)):
        return None
    first = keys.first_layer
    if first is not None and raw.get("max_window_layers", first) >= raw["num_hidden_layers"]:
        return None
    off = "false" if own_switch else "null"
    return (
        f"{keys.key} is set, and rlctl trains full attention alone; {keys.key}: {off} there changes nothing for "
        f"sequences of at most {window} tokens"
    )


def _rotary(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (type, parameters) of the rotary embedding's scale."""
    scale = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scale = scale if isinstance(scale, dict) else {}
    return str(scale.get("rope_type") or scale.get("type") or "default"), scale


def _rope(raw: dict[str, Any]) -> str | None:
    kind, known = _rotary(raw)[0], ", ".join(ROPE_TYPES)
    if kind in ROPE_TYPES:
        return None
    return f"rope_type {kind}: must be one of {known}, which turn a token the same whatever it is packed with"
