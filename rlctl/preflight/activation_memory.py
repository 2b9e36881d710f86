"""Forecast of the activations that a micro-batch keeps for its backward pass, in bytes. Pure.

It is an estimate after Korthikanti et al. (arXiv 2205.05198, section 4): bytes per token that a layer keeps, tensor by
tensor, with a gated MLP and without stored attention scores.
"""

from rlctl.models.facts import ModelSizes
from rlctl.preflight.trainer_settings import TrainerSettings


def activation_bytes(sizes: ModelSizes, tokens: int, size: int, residual: int, checkpointing: bool) -> int:
    """Return the bytes of the activations that one rank keeps for the backward pass of `tokens` tokens.

    size: bytes of a number in the compute dtype. residual: bytes of a number in the residual stream.

    A layer keeps the inputs and outputs of its two norms, q, k and v (twice if q and k have norms), the attention's
    output, and in the MLP: gate, up, their activation and product. A mixture of experts also keeps the inputs of all
    chosen experts. With checkpointing every layer keeps its input, and one layer keeps everything. Inputs of layers and
    norms have the residual's dtype.
    """
    hidden = sizes.hidden
    queries = sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    width = sizes.mlp_width
    # Each chosen expert has its own copy of the token's input.
    copies = sizes.experts_per_token * hidden if sizes.experts else 0
    normed = queries + keys if sizes.qk_norm else 0
    layer_bytes = 2 * hidden * residual + (2 * hidden + 2 * queries + 2 * keys + normed + 4 * width + copies) * size
    if checkpointing:
        return tokens * (sizes.layers * hidden * residual + layer_bytes)
    return tokens * sizes.layers * layer_bytes


def kept_bytes(trainer: TrainerSettings, sizes: ModelSizes, size: int, residual: int) -> int:
    """Return the bytes of activations that one micro-batch keeps. size, residual: see `activation_bytes`.

    For padded rows the bytes were measured (`ModelSizes.row_bytes`). They include attention scores, quadratic in a
    row's length, if transformers' attention keeps them.
    """
    tokens = trainer.micro_batch_tokens
    checkpointing = trainer.activation_checkpointing
    row_bytes = next((recorded for recorded in sizes.row_bytes if recorded.dtype == trainer.dtype), None)
    if row_bytes is None or trainer.row_tokens is None:
        return activation_bytes(sizes, tokens, size, residual, checkpointing)
    all_layer_bytes = tokens * (row_bytes.token + row_bytes.pair * min(tokens, trainer.row_tokens))
    if checkpointing:
        return tokens * sizes.layers * sizes.hidden * residual + all_layer_bytes // sizes.layers
    return all_layer_bytes
