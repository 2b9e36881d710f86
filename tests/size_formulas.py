"""Sizes of llama, qwen2, qwen3 and qwen3_moe models by formulas, to compare with the facts that rlctl derives."""

from typing import Any

from rlctl.models.facts import ModelSizes
from rlctl.models.layer_kinds import LinearLayer

# Head size of a model type whose config.json may lack one.
_HEAD_DIM = {"qwen3": 128}


def sizes_by_formula(raw: dict[str, Any]) -> ModelSizes:
    """Count the parameters of a config.json of one of the four kinds."""
    kind = raw["model_type"]
    hidden = raw["hidden_size"]
    layers = raw["num_hidden_layers"]
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    width = raw["intermediate_size"]
    head_dim = raw.get("head_dim") or _HEAD_DIM.get(kind, hidden // heads)
    bias = bool(raw.get("attention_bias"))
    mlp_bias = kind == "llama" and bool(raw.get("mlp_bias"))
    qkv_bias = bias or kind == "qwen2"
    output_bias = bias and kind != "qwen2"
    qk_norm = kind.startswith("qwen3")
    tied = bool(raw.get("tie_word_embeddings", False))
    is_mixture = kind == "qwen3_moe"
    experts = (raw.get("num_experts") or raw.get("num_local_experts") or 128) if is_mixture else 0
    experts_per_token = raw.get("num_experts_per_tok", 8) if is_mixture else 0
    expert_width = raw.get("moe_intermediate_size", 768) if is_mixture else 0
    dense_layers = raw.get("mlp_only_layers") or []
    step = raw.get("decoder_sparse_step", 1)
    is_sparse = [is_mixture and index not in dense_layers and (index + 1) % step == 0 for index in range(layers)]
    sparse_layers = sum(is_sparse)

    q = heads * head_dim
    kv = kv_heads * head_dim
    attention = hidden * (2 * q + 2 * kv)
    if qkv_bias:
        attention += q + 2 * kv
    if output_bias:
        attention += hidden
    if qk_norm:
        attention += 2 * head_dim
    mlp = 3 * hidden * width
    if mlp_bias:
        mlp += 2 * width + hidden
    expert = 3 * hidden * expert_width
    sparse_mlp = experts * (expert + hidden)
    linears: list[LinearLayer] = []
    for index in range(layers):
        linears += _linears_of_layer(index, hidden, q, kv, 0 if is_sparse[index] else width)
    embedding = raw["vocab_size"] * hidden
    parameters = layers * (attention + 2 * hidden) + (layers - sparse_layers) * mlp + sparse_layers * sparse_mlp
    parameters += embedding * (1 if tied else 2) + hidden
    active_parameters = parameters - sparse_layers * expert * (experts - experts_per_token)
    if not tied:
        active_parameters -= embedding
    return ModelSizes(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=width,
        mlp_width=max(experts_per_token * expert_width if sparse_layers else 0, width if sparse_layers < layers else 0),
        vocab=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        tied=tied,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        experts=experts if sparse_layers else 0,
        experts_per_token=experts_per_token if sparse_layers else 0,
        expert_intermediate=expert_width,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=sparse_layers,
        activation=str(raw.get("hidden_act", "silu")),
        parameters=parameters,
        active_parameters=active_parameters,
        expert_parameters=sparse_layers * experts * expert,
        largest_layer=attention + (sparse_mlp if sparse_layers else mlp) + 2 * hidden,
        embedding_parameters=embedding,
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        linears=tuple(linears),
        state_layers=0,
        one_sequence_a_row=None,
        dropout=(),
    )


def _linears_of_layer(index: int, hidden: int, q: int, kv: int, width: int) -> list[LinearLayer]:
    """Return the linear layers of attention and of a dense MLP. width: 0 if the layer's MLP is sparse."""
    attention = f"model.layers.{index}.self_attn"
    mlp = f"model.layers.{index}.mlp"
    linears = [
        LinearLayer(f"{attention}.q_proj", hidden, q, "attention"),
        LinearLayer(f"{attention}.k_proj", hidden, kv, "attention"),
        LinearLayer(f"{attention}.v_proj", hidden, kv, "attention"),
        LinearLayer(f"{attention}.o_proj", q, hidden, "attention"),
    ]
    if width:
        linears.append(LinearLayer(f"{mlp}.gate_proj", hidden, width, "mlp"))
        linears.append(LinearLayer(f"{mlp}.up_proj", hidden, width, "mlp"))
        linears.append(LinearLayer(f"{mlp}.down_proj", width, hidden, "mlp"))
    return linears
