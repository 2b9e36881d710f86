"""Trainer and generator must agree on weights and on log-probs: the probe before step 1, and the parity of later steps.

Checksums show that every tensor arrived as sent; sampled tokens show that both sides load and compute it in the same
way.
"""

from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.grpo.batch import training_sample
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.logprob_mismatch import Mismatch, mismatch
from rlctl.rollout.types import Sampling
from rlctl.training.micro_batching import TrainingSample

# Fewest prompts of a comparison, fewest of each engine, and the most tokens of each answer.
PROMPTS, PER_ENGINE, TOKENS = 8, 2, 16
# Largest acceptable mean of exp|trainer - generator|: float32 differs by rounding alone; for bfloat16 the field's
# own bound (NeMo-RL's documentation calls more than 1.05 a defect of the framework).
BOUNDS = {"float32": 1.001, "bfloat16": 1.05}


class ProbeError(RuntimeError):
    """Trainer and generator disagree: training on such samples would be silently wrong."""


def probe(config: GrpoConfig, parts: GrpoComponents, tasks: list[Task], version: int, dtype: str) -> Mismatch:
    """Sync with checksums, sample a few tokens, compare log-probs.

    Raises RefitError naming the first tensor that arrived changed, or ProbeError if log-probs differ by more
    than the dtype's bound although every tensor arrived intact.
    """
    parts.pool.sync(version, "all")
    samples = sample_parity(config, parts, tasks, version)
    if not samples:
        raise ProbeError(f"no episode could be played; most failed of {parts.failure_cause()}")
    gap = compare(parts, samples)
    if not gap.token_mult_prob_error <= BOUNDS[dtype]:
        unusual = ", ".join(parts.trainer.unusual_parts())
        raise ProbeError(
            f"trainer and generator disagree on log-probs: token_mult_prob_error {gap.token_mult_prob_error:.4f} over "
            f"{gap.tokens} tokens, at most {BOUNDS[dtype]} in {dtype}. All {len(parts.pool.plan.entries)} tensors "
            f"arrived intact, from {parts.pool.plan.entries[0].name} on: one side loads or computes them differently. "
            + (f"Look first, on both sides, at {unusual}" if unusual else "The model has no unusual layers")
        )
    return gap


def sample_parity(config: GrpoConfig, parts: GrpoComponents, tasks: list[Task], version: int) -> list[TrainingSample]:
    """Sample a few tokens from the whole distribution while trainer and generator both have `version`.

    Other requests go on meanwhile. Empty if every episode failed.
    """
    tasks = tasks[: max(PROMPTS, PER_ENGINE * len(parts.pool.engines))]
    length = min(TOKENS, config.generation.max_new_tokens)
    sampling = Sampling("parity", config.run.seed, len(tasks), 1, length, config.generation.temperature)
    groups = parts.dispatcher.sample(parts.runner, sampling, tasks, version)
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    return [training_sample(row, 0.0) for row in rows]


def compare(parts: GrpoComponents, samples: list[TrainingSample]) -> Mismatch:
    """Return the gap of the samples' log-probs to the trainer's, which still has their version."""
    theirs = [sample.columns["rollout_log_prob"] for sample in samples]
    return mismatch(theirs, parts.trainer.log_probs(samples), [sample.mask for sample in samples])
