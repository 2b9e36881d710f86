"""Checks of a config's trainer: optimizer, offloading, profile, parallel layout, and batch size."""

from rlctl.config.fields import MOST_SEQUENCES
from rlctl.config.schema import RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import Violation, Violations, backend_of, other_backends, unbroken
from rlctl.preflight.settled import Settled

LOG_PROBS = "trainer.offload_optimizer_for_logprob"
GENERATION = "trainer.offload_optimizer_for_generation"
_ON_HOST = "trainer.megatron.optimizer_cpu_offload"


def check_optimizer(config: RunConfig) -> Violations:
    """Find betas that are not two numbers."""
    betas = config.trainer.optimizer.betas
    if len(betas) != 2:
        yield Violation("trainer.optimizer.betas", f"must be two numbers, not {len(betas)}")


def check_profile(config: RunConfig) -> Violations:
    """Find a `profile_updates` that is not [first, last]."""
    updates = config.telemetry.profile_updates
    if updates is not None and (len(updates) != 2 or updates[0] > updates[1]):
        yield Violation("telemetry.profile_updates", f"must be [first, last], not {updates}")


def check_offload(config: RunConfig) -> Violations:
    """Find switches that would move optimizer state to the host although it is always there."""
    trainer = config.trainer
    moves = {LOG_PROBS: trainer.offload_optimizer_for_logprob, GENERATION: trainer.offload_optimizer_for_generation}
    for key, is_on in moves.items():
        if is_on and backend_of(trainer).optimizer_on_host(trainer):
            message = f"does not go with {_ON_HOST}=true, which keeps optimizer state on the host at all times"
            yield Violation(key, f"{message}; choose one", (_ON_HOST,))


def check_backends(config: RunConfig, sizes: ModelSizes | None, sequences: int | None) -> Violations:
    """Find values that the backend does not support, and keys of other backends. A broken value ends only its check.

    sequences: number in one update; None when the config's value is wrong.
    """
    trainer = config.trainer
    backend = backend_of(trainer)
    checks = [backend.check_keys(trainer), *(other.check_unused(trainer) for other in other_backends(trainer))]
    checks += [backend.check_layout(trainer, sizes, sequences), backend.check_model(trainer, sizes)]
    for violations in (*checks, backend.check_optimizer(trainer, sizes)):
        yield from unbroken(violations)


def check_batch(settled: Settled) -> Violations:
    """Find a batch that cannot be split into equal updates, or an update with fewer sequences than data-parallel
    shards.
    """
    trainer = settled.config.trainer
    step = settled.config.step_shape
    if settled.grpo:
        prompts = step.prompts
        updates = step.updates
        if prompts % updates:
            nearest_multiple = max(updates, round(prompts / updates) * updates)
            message = f"{prompts} prompts cannot be shared equally among {updates} updates a step"
            message = f"{message}; try {nearest_multiple}"
            yield Violation("grpo.num_prompts_per_step", message, ("grpo.updates_per_step",))
            return
        if prompts * step.group > MOST_SEQUENCES:
            rollouts = f"{prompts:,} prompts x {step.group:,} rollouts"
            message = f"{rollouts} are more than a step can hold, {MOST_SEQUENCES:,}"
            yield Violation("grpo.num_generations_per_prompt", message, ("grpo.num_prompts_per_step",))
            return
    backend = backend_of(trainer)
    shards = backend.layout(trainer).data
    sequences = step.per_update
    if sequences >= shards:
        return
    shard_name = backend.shard_name
    advice = backend.suggest_layout(trainer, settled.facts, sequences)
    if settled.grpo:
        message = f"{shards} {shard_name}s but only {sequences} rollouts an update: at least one a {shard_name} is"
        other_keys = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.updates_per_step")
        yield Violation("trainer.num_ranks", f"{message} needed{advice}", other_keys)
    else:
        message = f"must be at least the {shards} {shard_name}s of the trainer, not {sequences}{advice}"
        yield Violation("sft.batch_size", message, ("trainer.num_ranks",))
