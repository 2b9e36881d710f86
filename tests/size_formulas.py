"""Sizes of llama, qwen2, qwen3 and qwen3_moe by formula: what derived facts are compared with."""

from typing import Any

from rlctl.models.facts import ModelSizes
from rlctl.models.layer_kinds import LinearLayer

# Where config.json has none.
_HEAD_DIM = {"qwen3": 128}


def sizes_by_formula(raw: dict[str, Any]) -> ModelSizes:
    """Count the parameters of a config.json of one of the four kinds."""
    kind, hidden, layers, heads = (
        raw[key] for key in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads, vocab, width = raw.get("num_key_value_heads") or heads, raw["vocab_size"], raw["intermediate_size"]
    head_dim = raw.get("head_dim") or _HEAD_DIM.get(kind, hidden // heads)
    bias, mlp_bias = bool(raw.get("attention_bias")), kind == "llama" and bool(raw.get("mlp_bias"))
    qkv_bias, output_bias = bias or kind == "qwen2", bias and kind != "qwen2"
    qk_norm, tied = kind.startswith("qwen3"), bool(raw.get("tie_word_embeddings", False))
    mixture = kind == "qwen3_moe"
    experts = (raw.get("num_experts") or raw.get("num_local_experts") or 128) if mixture else 0
    used = raw.get("num_experts_per_tok", 8) if mixture else 0
    expert_width = raw.get("moe_intermediate_size", 768) if mixture else 0
    dense = raw.get("mlp_only_layers") or []
    step = raw.get("decoder_sparse_step", 1)
    is_sparse = [mixture and index not in dense and (index + 1) % step == 0 for index in range(layers)]
    sparse = sum(is_sparse)

    q, kv = heads * head_dim, kv_heads * head_dim
    attention = hidden * (2 * q + 2 * kv) + (q + 2 * kv) * qkv_bias + hidden * output_bias + 2 * head_dim * qk_norm
    mlp = 3 * hidden * width + (2 * width + hidden) * mlp_bias
    expert = 3 * hidden * expert_width
    sparse_mlp = experts * (expert + hidden)
    linears = []
    for index in range(layers):
        own = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
        gated = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        parts = {("attention", "self_attn"): own, ("mlp", "mlp"): {} if is_sparse[index] else gated}
        for (part, module), found in parts.items():
            place = f"model.layers.{index}.{module}"
            linears += [LinearLayer(f"{place}.{name}", *each, part) for name, each in found.items()]
    embedding = vocab * hidden
    parameters = layers * (attention + 2 * hidden) + (layers - sparse) * mlp + sparse * sparse_mlp
    parameters += embedding * (1 if tied else 2) + hidden
    return ModelSizes(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=width,
        mlp_width=max(used * expert_width if sparse else 0, width if sparse < layers else 0),
        vocab=vocab,
        max_positions=raw["max_position_embeddings"],
        tied=tied,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        experts=experts if sparse else 0,
        experts_per_token=used if sparse else 0,
        expert_intermediate=expert_width,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=sparse,
        activation=str(raw.get("hidden_act", "silu")),
        parameters=parameters,
        active_parameters=parameters - sparse * expert * (experts - used) - embedding * (not tied),
        expert_parameters=sparse * experts * expert,
        largest_layer=attention + (sparse_mlp if sparse else mlp) + 2 * hidden,
        embedding_parameters=embedding,
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        linears=tuple(linears),
        state_layers=0,
        one_sequence_a_row=None,
        dropout=(),
    )
