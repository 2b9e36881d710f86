"""Contradictions of the parallel layout and the batch that it splits, as (key, what is wrong, other keys).

One line a key, whatever it contradicts.
"""

from rlctl.config.fields import MOST_SEQUENCES
from rlctl.config.schema import GrpoConfig, RunConfig, TrainerSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import Found, backend_of, other_backends
from rlctl.preflight.resolved import Resolved


def check_backend(trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> list[Found]:
    """Return the checks of the backend, and of keys of backends that do not train.

    A value that is broken ends one of them alone.
    """
    backend = backend_of(trainer)
    own = [backend.check_keys(trainer), *(other.check_unused(trainer) for other in other_backends(trainer))]
    of_model = [backend.check_model(trainer, sizes), backend.check_optimizer(trainer, sizes)]
    return [*own, backend.check_layout(trainer, sizes, sequences), *of_model]


def check_batch(config: RunConfig, sizes: ModelSizes | None) -> Found:
    """Find shards of an update that would get no rollout or sample."""
    trainer = config.trainer
    if isinstance(config, GrpoConfig):
        prompts, updates = config.grpo.num_prompts_per_step, config.grpo.updates_per_step
        if prompts % updates:
            near = max(updates, round(prompts / updates) * updates)
            what = f"{prompts} prompts cannot be shared equally among {updates} updates a step; try {near}"
            yield "grpo.num_prompts_per_step", what, ("grpo.updates_per_step",)
            return
        if prompts * config.grpo.num_generations_per_prompt > MOST_SEQUENCES:
            rollouts = f"{prompts:,} prompts x {config.grpo.num_generations_per_prompt:,} rollouts"
            what = f"{rollouts} are more than a step can hold, {MOST_SEQUENCES:,}"
            yield "grpo.num_generations_per_prompt", what, ("grpo.num_prompts_per_step",)
            return
    backend = backend_of(trainer)
    have, asked = Resolved(config).sequences_per_update, backend.layout(trainer)
    if have >= asked.data:
        return
    unit, advice = backend.shard_name, backend.suggest_layout(trainer, sizes, have)
    if isinstance(config, GrpoConfig):
        what = f"{asked.data} {unit}s but only {have} rollouts an update: at least one a {unit} is needed{advice}"
        others = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.updates_per_step")
        yield "trainer.num_ranks", what, others
    else:
        what = f"must be at least the {asked.data} {unit}s of the trainer, not {have}{advice}"
        yield "sft.batch_size", what, ("trainer.num_ranks",)
