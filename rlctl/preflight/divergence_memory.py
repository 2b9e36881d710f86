"""Memory of a rank whose updates compute a divergence from a teacher (`grpo.loss.distillation.over`)."""

from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import backend_of
from rlctl.preflight.machine import Device
from rlctl.preflight.trainer_settings import DTYPE_BYTES, TeacherUse, TrainerSettings

# Bytes of a logit of the policy and of the same one of the teacher while a chunk's gradient is computed. torch's
# operations took 26, with a softcap 30; compiled code took 8 (H200, 151,936 tokens), and the allocator some more.
_LOGIT_BYTES = 30
_FUSED_LOGIT_BYTES = 10


def divergence_bytes(
    trainer: TrainerSettings, teacher: TeacherUse, sizes: ModelSizes, device: Device
) -> dict[str, int]:
    """Return purpose -> bytes of a rank for a divergence from a teacher, in an update."""
    size = DTYPE_BYTES[trainer.dtype]
    shards = backend_of(trainer).shard_counts(trainer)
    if not teacher.is_resident:
        # A copy of the head alone outlasts the pass.
        weights = teacher.sizes.embedding_parameters
        tokens = teacher.update_tokens
    else:
        # On a CPU `frozen` counts the weights.
        weights = 0 if device == "cpu" else shards.rank_parameters(teacher.sizes)
        if shards.weights > 1:
            outer_weights = (1 if teacher.sizes.tied else 2) * teacher.sizes.embedding_parameters
            weights += outer_weights + 2 * teacher.sizes.largest_layer
        tokens = trainer.micro_batch_tokens
    logit_bytes = _FUSED_LOGIT_BYTES if trainer.compile else _LOGIT_BYTES
    # The log-probs' logits are kept, and their gradient of the output layer waits for the divergence's.
    gradient_bytes = 0 if trainer.adapters else sizes.embedding_parameters * size
    return {
        "teacher's weights": weights * size,
        "teacher's states": tokens * teacher.token_bytes,
        "divergence": trainer.logprob_chunk_tokens * logit_bytes * sizes.vocab + gradient_bytes,
    }
