"""Trainer and generator must agree on weights and on log-probs: the probe before step 1, and the parity of later steps.

Checksums show that every tensor arrived as sent; sampled tokens show that it was loaded and computed alike.
"""

from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.generation.requests import TurnRequest
from rlctl.grpo.batch import to_sequence
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.logprob_mismatch import Mismatch, mismatch
from rlctl.rollout.seeds import PROBE, rollout_seeds

# At least so many prompts in all, and of each engine.
PROMPTS, PER_ENGINE, TOKENS = 8, 2, 16
# Largest acceptable mean of exp|trainer - generator|: float32 differs by rounding alone; for bfloat16 the field's
# own bound (NeMo-RL's documentation calls more than 1.05 a defect of the framework).
BOUNDS = {"float32": 1.001, "bfloat16": 1.05}


class ProbeError(RuntimeError):
    """Trainer and generator disagree: training on such samples would be silently wrong."""


def probe(config: GrpoConfig, parts: GrpoComponents, prompts: list[Task], version: int, dtype: str) -> Mismatch:
    """Refit with checksums, sample a few tokens, compare log-probs.

    Raises RefitError naming the first tensor that arrived changed, or ProbeError if log-probs differ by more
    than the dtype's bound although every tensor arrived intact.
    """
    parts.pool.sync(version, "all")
    gap = parity(config, parts, prompts, version)
    if not gap.token_mult_prob_error <= BOUNDS[dtype]:
        raise ProbeError(
            f"trainer and generator disagree on log-probs: token_mult_prob_error {gap.token_mult_prob_error:.4f} over "
            f"{gap.tokens} tokens, at most {BOUNDS[dtype]} in {dtype}. All {len(parts.pool.plan.entries)} tensors "
            f"arrived intact, from {parts.pool.plan.entries[0].name} on: the engine loads or computes them differently"
        )
    return gap


def parity(config: GrpoConfig, parts: GrpoComponents, prompts: list[Task], version: int) -> Mismatch:
    """Sample a few tokens while trainer and generator both have `version`, and compare their log-probs.

    What else the engines sample goes on meanwhile.
    """
    prompts = prompts[: max(PROMPTS, PER_ENGINE * len(parts.pool.engines))]
    seeds = rollout_seeds(config.run.seed, PROBE, version, len(prompts))
    length = min(TOKENS, config.generation.max_new_tokens)
    requests = [
        TurnRequest(f"probe-{prompt.id}", prompt.tokens, 1, length, config.generation.temperature, seed)
        for prompt, seed in zip(prompts, seeds)
    ]
    groups = parts.pool.generate(requests)
    sequences = [to_sequence(prompt, group[0], 0.0) for prompt, group in zip(prompts, groups)]
    theirs = [sequence.fields["rollout_log_prob"] for sequence in sequences]
    return mismatch(theirs, parts.trainer.log_probs(sequences), [sequence.mask for sequence in sequences])
