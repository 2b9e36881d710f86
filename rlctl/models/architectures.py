"""Table of the architectures that rlctl trains, one row each. A row holds all that differs between them.

Keys are those of config.json. Names of modules and tensors are those of transformers and of its checkpoints. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# True or false for the whole architecture, or the key of config.json that holds it.
Flag = bool | str


@dataclass(frozen=True)
class WindowKeys:
    """Keys of layers that see the last `sliding_window` tokens alone. rlctl does not train such layers."""

    # Key that turns windows on.
    key: str = "use_sliding_window"
    # sliding_window where config.json has none.
    size: int | None = 4096
    # max_window_layers where config.json has none; None: windows are on every layer.
    first_layer: int | None = None
    # True if layer_types decides where config.json has it.
    listed: bool = True


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of a mixture of experts in place of some layers' MLP."""

    # Keys of the number of experts; the first that is set counts.
    number: tuple[str, ...]
    # (key, value where config.json has none)
    per_token: tuple[str, int]
    width: tuple[str, int]
    # Module of a layer that holds all its experts as one gate_up_proj and one down_proj.
    module: str = "mlp.experts"


@dataclass(frozen=True)
class ArchitectureRow:
    """One architecture."""

    # Class in transformers and vLLM.
    causal_lm: str
    # head_dim where config.json has none; None: hidden size over heads.
    head_dim: int | None = None
    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    mlp_bias: Flag = False
    # Norms of the heads' q and k.
    qk_norm: bool = False
    window: WindowKeys = WindowKeys()
    experts: ExpertKeys | None = None
    backbone: str = "model"
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    # True if backend megatron has its layers and their mapping.
    megatron: bool = True
    # Keys of the tests' model besides its sizes.
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def sparse_layers(self, raw: Mapping[str, Any]) -> list[bool]:
        """Return for each layer of a config.json if its MLP is a mixture of experts."""
        dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
        layers = range(raw["num_hidden_layers"])
        return [self.experts is not None and index not in dense and (index + 1) % step == 0 for index in layers]


# By model_type.
ARCHITECTURES = {
    "llama": ArchitectureRow(
        causal_lm="LlamaForCausalLM",
        mlp_bias="mlp_bias",
        # None in transformers, but one of all layers in vLLM.
        window=WindowKeys("sliding_window", size=None),
        tiny={"tie_word_embeddings": False},
    ),
    "qwen2": ArchitectureRow(
        causal_lm="Qwen2ForCausalLM",
        qkv_bias=True,
        output_bias=False,
        window=WindowKeys(first_layer=28),
        tiny={"tie_word_embeddings": True},
    ),
    "qwen3": ArchitectureRow(
        causal_lm="Qwen3ForCausalLM",
        head_dim=128,
        qk_norm=True,
        window=WindowKeys(first_layer=28),
        tiny={"tie_word_embeddings": True},
    ),
    "qwen3_moe": ArchitectureRow(
        causal_lm="Qwen3MoeForCausalLM",
        qk_norm=True,
        window=WindowKeys(listed=False),
        experts=ExpertKeys(
            # transformers 5 writes num_local_experts where 4 wrote num_experts.
            number=("num_experts", "num_local_experts"),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 768),
        ),
        tiny={"tie_word_embeddings": False, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}


def own_keys() -> list[str]:
    """Return the keys of config.json that only some rows' sizes depend on."""
    keys: list[str] = []
    for row in ARCHITECTURES.values():
        keys += [flag for flag in (row.qkv_bias, row.output_bias, row.mlp_bias) if isinstance(flag, str)]
        if row.experts:
            keys += [*row.experts.number, row.experts.per_token[0], row.experts.width[0]]
    return list(dict.fromkeys(keys))


def is_fused(name: str) -> bool:
    """Return True if a parameter holds all experts of a layer."""
    module, _, leaf = name.rpartition(".")
    return leaf in ("gate_up_proj", "down_proj") and module.endswith(_expert_modules())


def is_expert(name: str) -> bool:
    """Return True if a checkpoint's tensor belongs to an expert."""
    return any(f"{module}." in name for module in _expert_modules())


def _expert_modules() -> tuple[str, ...]:
    return tuple({f".{row.experts.module}" for row in ARCHITECTURES.values() if row.experts})
