"""What a model's config.json tells, read as plain JSON: sizes, limits and the number of its parameters.

Parameters are counted by formula for the four architectures that rlctl trains, exactly as transformers builds
them, so that checks and memory forecasts need neither torch nor the weights.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder. sparse_layers: layers whose MLP is a mixture of experts."""

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
    sparse_layers: int

    @property
    def attention_parameters(self) -> int:
        """Of one layer: q, k, v, o, their biases, and the norms of q and k."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = (q + 2 * kv) * self.qkv_bias + self.hidden * self.output_bias
        return self.hidden * (2 * q + 2 * kv) + bias + 2 * self.head_dim * self.qk_norm

    @property
    def dense_mlp_parameters(self) -> int:
        """Of one layer: gate, up, down."""
        return 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias

    @property
    def sparse_mlp_parameters(self) -> int:
        """Of one layer: all experts and the router."""
        return self.experts * 3 * self.hidden * self.expert_intermediate + self.hidden * self.experts

    @property
    def expert_parameters(self) -> int:
        """Of all experts, without their routers."""
        return self.sparse_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer: what FSDP gathers at a time."""
        mlp = self.sparse_mlp_parameters if self.sparse_layers else self.dense_mlp_parameters
        return self.attention_parameters + mlp + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the input embedding; the output has as many of its own unless tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        dense = self.layers - self.sparse_layers
        mlp = dense * self.dense_mlp_parameters + self.sparse_layers * self.sparse_mlp_parameters
        layers = self.layers * (self.attention_parameters + 2 * self.hidden) + mlp
        return layers + self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the key-value cache holds for one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def config_file(model: str) -> Path | None:
    """The config.json of a model folder, or of a hub name already in the local hub cache; None when not here."""
    folder = Path(model)
    # Path.is_dir would raise for what no file can be named.
    if not os.path.isdir(folder):
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
        reference = cache / "refs/main"
        if not os.path.isfile(reference):
            return None
        folder = cache / "snapshots" / reference.read_text().strip()
    return folder / "config.json" if (folder / "config.json").is_file() else None


def architecture_of(model: str) -> Architecture | None:
    """Of a model folder or hub name; None when its config.json is not here. Raises ValueError as below."""
    file = config_file(model)
    return read_architecture(file) if file else None


def read_architecture(file: Path) -> Architecture:
    """Raises ValueError with one line: not JSON, another kind of model, a size missing."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type {kind} in {file}: must be one of {', '.join(MODEL_TYPES)}")
    try:
        return _architecture(kind, raw)
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]}") from error


def _architecture(kind: str, raw: dict[str, Any]) -> Architecture:
    hidden, layers, heads = (raw[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    qwen3 = kind in ("qwen3", "qwen3_moe")
    return Architecture(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
        intermediate=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        max_positions=_max_positions(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
        output_bias=kind != "qwen2" and bool(raw.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=qwen3,
        # transformers 5 writes num_local_experts where 4 wrote num_experts.
        experts=raw.get("num_experts") or raw["num_local_experts"] if kind == "qwen3_moe" else 0,
        experts_per_token=raw.get("num_experts_per_tok", 8) if kind == "qwen3_moe" else 0,
        expert_intermediate=raw.get("moe_intermediate_size", 768) if kind == "qwen3_moe" else 0,
        sparse_layers=_sparse_layers(raw, layers) if kind == "qwen3_moe" else 0,
    )


def _max_positions(raw: dict[str, Any]) -> int:
    """max_position_embeddings, or what a scaled rotary embedding stretches it to."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    stretched = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1)
    return max(int(raw["max_position_embeddings"]), int(stretched))


def _sparse_layers(raw: dict[str, Any], layers: int) -> int:
    dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    return sum(index not in dense and (index + 1) % step == 0 for index in range(layers))
