"""Tiny random models of many families with their real features on, each with its expected result.

`make_family(tmp_path / "m", "gemma2")` writes a folder as `make_model` does. A family that trains is exact: packed as
alone, trainer as engine, the served weights as the sent ones. Every other one has the words of its refusal.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny_models import EOS, PAD, make_tokenizer

VOCAB = 64
LAYERS = 4
WINDOW = 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
FULL = "full_attention"
SLIDING = "sliding_attention"
_HALF = [SLIDING, FULL] * (LAYERS // 2)
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _HALF}
_TIED = {"tie_word_embeddings": True}
_OWN_HEADS = {"num_key_value_heads": None, "head_dim": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "sliding_window": None,
}  # fmt: skip
_GEMMA4 = {
    **_WINDOWS, **_TIED, "global_head_dim": 64, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}  # fmt: skip
# vLLM has kernels only for these sizes of latents and rotary embeddings.
_LATENT = {
    "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", FULL] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}


@dataclass(frozen=True)
class Family:
    """A tiny model, and the expected result of `rlctl model check` on it."""

    # model_type of config.json, and its keys over COMMON. A value of None there leaves the key out.
    kind: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    # Keys of published config.json files that transformers does not write, and vLLM reads.
    hub: Mapping[str, Any] = field(default_factory=dict)
    # Mechanisms for which this family is the suite's example, such as window or experts.
    shows: tuple[str, ...] = ()
    # Factor on the random matrices, so that log-probs are far from uniform.
    scale: float = 4.0
    # Pattern of the message with which the family is refused on a CPU; empty if it trains.
    refused: str = ""


# vLLM 0.32 on a CPU, by `preflight/engines/vllm.py`.
_CPU = "on a CPU vLLM .* fails: "


FAMILIES: dict[str, Family] = {
    # Full attention in every layer.
    "llama": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Family("qwen2", _TIED),
    "qwen3": Family("qwen3", _TIED, shows=("ties",)),
    "ministral3": Family("ministral3"),
    "phi3": Family("phi3", shows=("fused projections",)),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "smollm3": Family("smollm3", {**_TIED, "no_rope_layer_interval": 2}),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "ernie4_5": Family("ernie4_5", _TIED),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "arcee": Family("arcee"),
    "helium": Family("helium"),
    "stablelm": Family("stablelm", shows=("rows",)),
    "gemma": Family("gemma", _TIED),
    "nemotron": Family("nemotron"),
    "granite": Family(
        "granite",
        {"logits_scaling": 0.25, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.3},
        shows=("logit scale", "attention scale"),
    ),
    "cohere": Family("cohere", {**_TIED, "logit_scale": 4.0, "use_qk_norm": False}),
    "seed_oss": Family(
        "seed_oss", {"attention_dropout": 0.1, "residual_dropout": 0.1, "attention_bias": True}, shows=("dropout",)
    ),
    "apertus": Family("apertus", {"hidden_act": "xielu"}, refused=f"{_CPU}its log-probs are 1.00107"),
    "phi": Family("phi", {"head_dim": None, "num_key_value_heads": 4}, shows=("head bias",)),
    "gpt_neox": Family("gpt_neox", {"head_dim": None, "num_key_value_heads": None, "rotary_pct": 0.5}),
    "nanochat": Family("nanochat"),
    # Windows, softcaps, sinks.
    "mistral": Family("mistral", {"sliding_window": WINDOW}, shows=("window",)),
    "ministral": Family("ministral", _WINDOWS),
    "starcoder2": Family("starcoder2", {**_TIED, "sliding_window": WINDOW}),
    "olmo3": Family("olmo3", _WINDOWS),
    "exaone4": Family("exaone4", {**_WINDOWS, "sliding_window_pattern": None}),
    "cwm": Family("cwm", {**_WINDOWS, "bos_token_id": 2}),
    "gemma2": Family(
        "gemma2",
        {**_WINDOWS, **_TIED, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
        shows=("softcap", "logit softcap"),
    ),
    "gemma3_text": Family("gemma3_text", {**_WINDOWS, **_TIED, "query_pre_attn_scalar": 16}),
    "gemma4_text": Family("gemma4_text", _GEMMA4, shows=("head sizes by layer",)),
    "cohere2": Family(
        "cohere2", {**_WINDOWS, **_TIED, "logit_scale": 4.0}, refused=f"{_CPU}its windows have one token more"
    ),
    # Mixtures of experts.
    "qwen3_moe": Family("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}, shows=("experts",)),
    "qwen2_moe": Family("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}, shows=("shared expert",)),
    "olmoe": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "mixtral": Family("mixtral", _LOCAL),
    "granitemoe": Family("granitemoe", {**_LOCAL, "logits_scaling": 0.25}, shows=("fused experts",)),
    "glm4_moe": Family("glm4_moe", {**_ROUTED, "use_qk_norm": True}, shows=("buffers",)),
    "dots1": Family("dots1", _ROUTED),
    "exaone_moe": Family(
        "exaone_moe",
        {
            **_WINDOWS,
            **_EXPERTS,
            "sliding_window_pattern": None,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 1,
        },
        refused=f"{_CPU}its router leaves out the correction bias",
    ),
    "flex_olmo": Family("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "gemma4_moe": Family(
        "gemma4_text",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {**_LOCAL, **_WINDOWS},
        shows=("sinks", "transposed experts"),
        refused=f"{_CPU}its experts are wrong after a change of weights",
    ),
    "minimax_m2": Family("minimax_m2", _LOCAL, {"rotary_dim": 32}, refused=f"{_CPU}its router takes softmax"),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            **_WINDOWS,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        refused="does not build MiMoV2FlashForCausalLM: .*; it reads hybrid_layer_pattern from config.json",
    ),
    # Multi-head latent attention.
    "deepseek_v2": Family(
        "deepseek_v2", {**_LATENT, **_ROUTED, "topk_method": "greedy"}, refused=f"{_CPU}its log-probs are 1.90"
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**_LATENT, **_ROUTED},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        shows=("value size",),
        refused=f"{_CPU}its log-probs are 1.36",
    ),
    # States.
    "qwen3_next": Family(
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.5},
        shows=("gated delta",),
        refused=f"{_CPU}its gated delta layers run in bfloat16",
    ),
    "qwen3_5_text": Family("qwen3_5_text", _DELTA, refused=f"{_CPU}its module of Qwen3.5 imports torchvision"),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64},
        refused=f"{_CPU}its module of Qwen3.5 imports torchvision",
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        {"layer_types": ["linear_attention", FULL] * 2},
        refused=f"{_CPU}its gated delta layers need Triton",
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "lm_head_multiplier": 2.0,
            "embedding_multiplier": 2.0,
            "key_multiplier": 0.7,
        },
        shows=("state space",),
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **_LOCAL,
            **_MAMBA,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"] * 2,
            "logits_scaling": 0.25,
            "position_embedding_type": "nope",
        },
    ),
    "bamba": Family(
        "bamba",
        {**_MAMBA, "attn_layer_indices": [1, 3]},
        refused="does not dispatch through the Transformers attention interface",
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe", "attention"],
            "num_hidden_layers": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_groups": 1,
            "moe_shared_expert_intermediate_size": 64,
        },
        refused=f"{_CPU}its experts must have a gate",
    ),
    "lfm2": Family(
        "lfm2",
        {**_TIED, "layer_types": ["conv", FULL] * 2, "block_ff_dim": 256, "conv_L_cache": 3},
        {"conv_dim": 128, "conv_dim_out": 128},
        shows=("short convolution",),
        refused=f"{_CPU}its log-probs are 1.31",
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            **_TIED,
            "layer_types": ["conv", FULL] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "conv_L_cache": 3,
        },
        refused=f"{_CPU}its log-probs are 1.37",
    ),
    "mamba2": Family(
        "mamba2",
        {"num_heads": 8, "head_dim": 32, "state_size": 16, "chunk_size": 16, "n_groups": 1, "expand": 2},
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "layer_types": ["linear_attention", FULL] * 2,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        refused=f"{_CPU}its delta attention has Triton kernels alone",
    ),
    # One sequence a row.
    "bloom": Family("bloom", {**_OWN_HEADS, **_TIED, "n_layer": LAYERS, "n_head": 4}),
    "gptj": Family(
        "gptj", {**_OWN_HEADS, "n_embd": 128, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 16, "n_positions": 256}
    ),
    "falcon": Family(
        "falcon", {**_OWN_HEADS, **_TIED, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
    ),
    "mamba": Family(
        "mamba",
        {**_OWN_HEADS, **_TIED, "num_attention_heads": None, "state_size": 16},
        scale=1.0,
        refused=f"{_CPU}its scan has CUDA kernels alone",
    ),
    "llama4_text": Family(
        "llama4_text",
        {"attention_chunk_size": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128},
        refused=f"{_CPU}its chunks of attention must be multiples of its blocks",
    ),
    "minimax": Family(
        "minimax",
        {**_LOCAL, "layer_types": ["linear_attention", FULL] * 2, "block_size": 16},
        refused="does not dispatch through the Transformers attention interface",
    ),
}

# GPT-2 and its kin, by the trainer's part alone: `test_zoo.py`.
_HEADS = {**_OWN_HEADS, "n_embd": 128, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
KIN: dict[str, Family] = {
    "gpt2": Family("gpt2", {**_HEADS, **_TIED}),
    "gpt_bigcode": Family("gpt_bigcode", {**_HEADS, **_TIED}),
    "gpt_neo": Family(
        "gpt_neo",
        {
            **_OWN_HEADS,
            **_TIED,
            "num_layers": LAYERS,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "opt": Family("opt", {**_OWN_HEADS, **_TIED, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "codegen": Family("codegen", {**_HEADS, "rotary_dim": 16, "n_ctx": 256}),
}


def family_config(name: str, **other: Any) -> Any:
    """Return the configuration of a family, with other values of some keys."""
    from transformers import AutoConfig

    family = (FAMILIES | KIN)[name]
    keys = {key: value for key, value in (COMMON | dict(family.keys) | other).items() if value is not None}
    keys.setdefault("bos_token_id", None)
    return AutoConfig.for_model(family.kind, **keys)


def make_family(folder: Path, name: str, seed: int = 0, scale: float | None = None, **other: Any) -> Path:
    """Write a family's random float32 model and the character tokenizer; return `folder`.

    scale: of its matrices, `Family.scale` unless given. Biases, norms and buffers are random too. other: see
    `family_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    family = (FAMILIES | KIN)[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(family_config(name, **other), dtype=torch.float32)
        saved = model.state_dict()
        buffers = [
            buffer
            for key, buffer in model.named_buffers()
            # A random table of decays would look at later tokens.
            if key in saved and buffer.is_floating_point() and not key.endswith("decay")
        ]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.any():
                    parameter.mul_(family.scale if scale is None else scale)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for buffer in buffers:
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    if hub := family.hub:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(hub), indent=2))
    make_tokenizer(folder, VOCAB)
    return Path(folder)
