"""Checks of a config's trainer: optimizer, offloading, profile, parallel layout, and the batch that it splits."""

from rlctl.config.fields import MOST_SEQUENCES
from rlctl.config.schema import RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import Violation, Violations, backend_of, other_backends, unbroken
from rlctl.preflight.settled import Settled

LOG_PROBS, GENERATION = "trainer.offload_optimizer_for_logprob", "trainer.offload_optimizer_for_generation"
_ON_HOST = "trainer.megatron.optimizer_cpu_offload"


def check_optimizer(config: RunConfig) -> Violations:
    """Find betas that are not two numbers."""
    betas = config.trainer.optimizer.betas
    if len(betas) != 2:
        yield Violation("trainer.optimizer.betas", f"must be two numbers, not {len(betas)}")


def check_profile(config: RunConfig) -> Violations:
    """Find updates to profile that are no range."""
    updates = config.telemetry.profile_updates
    if updates is not None and (len(updates) != 2 or updates[0] > updates[1]):
        yield Violation("telemetry.profile_updates", f"must be [first, last], not {updates}")


def check_offload(config: RunConfig) -> Violations:
    """Find switches that move optimizer state already on the host."""
    trainer = config.trainer
    moves = {LOG_PROBS: trainer.offload_optimizer_for_logprob, GENERATION: trainer.offload_optimizer_for_generation}
    for key, wanted in moves.items():
        if wanted and backend_of(trainer).optimizer_on_host(trainer):
            what = f"does not go with {_ON_HOST}=true, which keeps optimizer state on the host at all times; choose one"
            yield Violation(key, what, (_ON_HOST,))


def check_backends(config: RunConfig, sizes: ModelSizes | None, sequences: int | None) -> Violations:
    """Find requests beyond the backend, and keys of other backends. A broken value ends one check alone.

    sequences: of an update; None when wrong.
    """
    trainer = config.trainer
    backend = backend_of(trainer)
    checks = [backend.check_keys(trainer), *(other.check_unused(trainer) for other in other_backends(trainer))]
    checks += [backend.check_layout(trainer, sizes, sequences), backend.check_model(trainer, sizes)]
    for violations in (*checks, backend.check_optimizer(trainer, sizes)):
        yield from unbroken(violations)


def check_batch(settled: Settled) -> Violations:
    """Find batches that cannot be split into updates, and shards of an update left empty."""
    trainer, step = settled.config.trainer, settled.config.step_shape
    if settled.grpo:
        prompts, updates = step.prompts, step.updates
        if prompts % updates:
            near = max(updates, round(prompts / updates) * updates)
            what = f"{prompts} prompts cannot be shared equally among {updates} updates a step; try {near}"
            yield Violation("grpo.num_prompts_per_step", what, ("grpo.updates_per_step",))
            return
        if prompts * step.group > MOST_SEQUENCES:
            rollouts = f"{prompts:,} prompts x {step.group:,} rollouts"
            what = f"{rollouts} are more than a step can hold, {MOST_SEQUENCES:,}"
            yield Violation("grpo.num_generations_per_prompt", what, ("grpo.num_prompts_per_step",))
            return
    backend = backend_of(trainer)
    have, asked = step.per_update, backend.layout(trainer)
    if have >= asked.data:
        return
    unit, advice = backend.shard_name, backend.suggest_layout(trainer, settled.facts, have)
    if settled.grpo:
        what = f"{asked.data} {unit}s but only {have} rollouts an update: at least one a {unit} is needed{advice}"
        others = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.updates_per_step")
        yield Violation("trainer.num_ranks", what, others)
    else:
        what = f"must be at least the {asked.data} {unit}s of the trainer, not {have}{advice}"
        yield Violation("sft.batch_size", what, ("trainer.num_ranks",))
