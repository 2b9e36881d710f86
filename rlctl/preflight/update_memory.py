"""Forecast of the memory that an update takes besides the states, in bytes. Pure.

Activations that a micro-batch keeps for its backward pass are an estimate after Korthikanti et al. (arXiv 2205.05198,
section 4): bytes per token that a layer keeps, tensor by tensor, with a gated MLP and without stored attention scores.
A divergence from a teacher (`grpo.loss.distillation.over`) adds the teacher's weights, its states and logits.
"""

from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import backend_of
from rlctl.preflight.machine import Device
from rlctl.preflight.trainer_settings import DTYPE_BYTES, TeacherUse, TrainerSettings

# Bytes of a logit of the policy and of the same one of the teacher while a chunk's gradient is computed. torch's
# operations took 26, with a softcap 30; compiled code took 8 (H200, 151,936 tokens), and the allocator some more.
_LOGIT_BYTES = 30
_FUSED_LOGIT_BYTES = 10


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


def divergence_bytes(
    trainer: TrainerSettings, teacher: TeacherUse, sizes: ModelSizes, device: Device
) -> dict[str, int]:
    """Return purpose -> bytes of a rank for a divergence from a teacher, in an update."""
    size = DTYPE_BYTES[trainer.dtype]
    shards = backend_of(trainer).shard_counts(trainer)
    if teacher.is_on_engines:
        weights = 0
        tokens = trainer.micro_batch_tokens
    elif not teacher.is_resident:
        # A copy of the head alone outlasts the pass.
        weights = teacher.sizes.embedding_parameters
        tokens = teacher.update_tokens
    else:
        # On a CPU `frozen` counts the weights.
        weights = 0 if device == "cpu" else shards.rank_parameters(teacher.sizes)
        if shards.weights > 1:
            weights += teacher.sizes.outer_parameters + 2 * teacher.sizes.largest_layer
        tokens = trainer.micro_batch_tokens
    logit_bytes = _FUSED_LOGIT_BYTES if trainer.compile else _LOGIT_BYTES
    # The log-probs' logits are kept, and their gradient of the output layer waits for the divergence's.
    gradient_bytes = 0 if trainer.adapters else sizes.embedding_parameters * size
    return {
        "teacher's weights": weights * size,
        "teacher's states": tokens * teacher.token_bytes,
        "divergence": trainer.logprob_chunk_tokens * logit_bytes * sizes.vocab + gradient_bytes,
    }
