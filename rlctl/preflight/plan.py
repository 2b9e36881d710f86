"""Plan of a run, worked out from its config alone, as plain data: `--dry-run` shows it.

Pure: the model's sizes and the machine are values. Units are bytes and tokens. A forecast that cannot be made (the
model's config.json is not on this machine) is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.config.errors import ModelError
from rlctl.config.fields import stated
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import backend_of, layout_of
from rlctl.preflight.engine import engine_rules
from rlctl.preflight.memory import Memory, forecast, refit_bytes
from rlctl.preflight.parallel_layout import Layout
from rlctl.preflight.placement import NodeResources, Placement, PlacementError, place, resources, this_machine
from rlctl.preflight.resolved import DTYPE_BYTES, Device, Resolved, device_of, longest_sequence
from rlctl.preflight.tuning import Choice, tune


@dataclass(frozen=True)
class BatchSize:
    """Sizes of one step."""

    prompts: int
    group: int
    rollouts: int
    updates: int
    per_update: int
    # Most sequences that a rank trains in an update; the ranks of a shard train the same.
    per_rank: int
    # Tokens of the longest sequence allowed.
    longest: int | None
    # Most tokens of a step.
    tokens: int | None
    # Sequences of the longest kind that fit into one micro-batch.
    full_sequences: int | None
    # Most forward passes that a rank needs for one update.
    micro_batches: int | None


@dataclass(frozen=True)
class Schedule:
    """Steps of the run, and how often it stops to validate and to save."""

    steps: int
    updates: int
    validations: int
    checkpoints: int
    kept: int
    # Bytes of one, with its export.
    checkpoint_bytes: int | None


@dataclass(frozen=True)
class RunPlan:
    """All that a dry run shows."""

    kind: str
    model: str
    parameters: int | None
    # None when the machine has too few devices; `misplaced` has the reason.
    placement: Placement | None
    misplaced: str | None
    # None for a backend that has one layout.
    layout: Layout | None
    batch: BatchSize
    memory: Memory | None
    # Reason why states cannot fit into a device's memory, without any estimate; None if they may.
    too_large: str | None
    # Reason why the engine's kernels cannot sample from the model on this device; None if they can.
    unserved: str | None
    schedule: Schedule
    # Bytes of a refit to each engine.
    refit: int | None
    # Values of the keys that were left at `auto`, with reasons.
    chosen: tuple[Choice, ...]
    notes: list[str]


# Share of a device's memory above which a forecast, an estimate, is too close.
_TIGHT = 0.93


def make_plan(
    config: RunConfig,
    sizes: ModelSizes | None,
    gpus: int,
    device_memory: int | None,
    nodes: Sequence[NodeResources] | None = None,
) -> RunPlan:
    """Return the plan of `config` on a machine with `gpus` GPUs (0: its CPU) of `device_memory` bytes each.

    nodes: those of a cluster instead, with a total of `gpus`.
    """
    tuned = tune(config, device_of(gpus), sizes, device_memory)
    config = tuned.config
    backend, resolved = backend_of(config.trainer), Resolved(config, device_of(gpus))
    placement, misplaced = None, None
    try:
        placement = place(this_machine(gpus) if nodes is None else nodes, resources(config), device_of(gpus))
    except PlacementError as error:
        misplaced = str(error)
    longest = longest_sequence(config, sizes)
    memory = forecast(resolved, sizes, device_memory, tuned.kv_cache_mib) if sizes else None
    schedule, sampling = _schedule(resolved, sizes), resolved.sampling
    return RunPlan(
        kind=config.kind,
        model=config.model.path,
        parameters=sizes.parameters if sizes else None,
        placement=placement,
        misplaced=misplaced,
        layout=backend.layout(config.trainer) if backend.has_layouts else None,
        batch=_batch(resolved, longest),
        memory=memory,
        too_large=_too_large(config, memory) if gpus else None,
        unserved=unserved(resolved, sizes),
        schedule=schedule,
        refit=refit_bytes(Resolved(sampling, resolved.device), sizes) if sizes and sampling else None,
        chosen=tuned.choices,
        notes=_notes(resolved, schedule.updates, memory, gpus),
    )


def _batch(resolved: Resolved, longest: int | None) -> BatchSize:
    config = resolved.config
    if isinstance(config, GrpoConfig):
        prompts, group = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
        updates = config.grpo.updates_per_step
    else:
        prompts, group, updates = config.sft.batch_size, 1, 1
    rollouts = prompts * group
    per_rank = -(-resolved.sequences_per_update // layout_of(config.trainer).data)
    full = stated(config.trainer.micro_batch_tokens) // longest if longest else None
    return BatchSize(
        prompts=prompts,
        group=group,
        rollouts=rollouts,
        updates=updates,
        per_update=resolved.sequences_per_update,
        per_rank=per_rank,
        longest=longest,
        tokens=rollouts * longest if longest else None,
        full_sequences=full,
        micro_batches=-(-per_rank // full) if full else None,
    )


def _schedule(resolved: Resolved, sizes: ModelSizes | None) -> Schedule:
    config, steps = resolved.config, resolved.num_steps
    updates = steps * (config.grpo.updates_per_step if isinstance(config, GrpoConfig) else 1)
    every = config.validation.every
    validations = 0
    if resolved.validates:
        # Also after the last step.
        validations = config.validation.at_start + -(-steps // every)
    often, at_end = config.checkpoint.every, config.checkpoint.at_end
    checkpoints = steps // often + (at_end and steps % often > 0) if often else int(at_end)
    size = None
    if sizes:
        # Weights and AdamW's two moments in float32, and the exported weights.
        exported = DTYPE_BYTES[resolved.export_dtype] * config.checkpoint.export
        size = sizes.parameters * (12 + exported)
    kept = min(checkpoints, config.checkpoint.keep_last + config.checkpoint.keep_best)
    return Schedule(steps, updates, validations, checkpoints, kept, size)


def _too_large(config: RunConfig, memory: Memory | None) -> str | None:
    """Return why no device can hold weights, gradients and optimizer state. They are the exact part of the forecast."""
    if memory is None or memory.capacity is None or memory.state_peak <= memory.capacity:
        return None
    taken, room = (f"{count / 2**30:.1f} GiB" for count in (memory.state_peak, memory.capacity))
    trainer = config.trainer
    advice = backend_of(trainer).more_room(trainer, memory.state_peak, memory.capacity)
    return f"weights, gradients and optimizer state alone take {taken} of each device, which has {room}; {advice}"


def unserved(resolved: Resolved, sizes: ModelSizes | None) -> str | None:
    """Return why the engine cannot sample from the model on the run's device; None if it can, or is not known."""
    sampling = resolved.sampling
    if sampling is None or sizes is None or resolved.device is None:
        return None
    return engine_rules(sampling.generation.engine).unserved(resolved.device, sampling.model.path, sizes)


def require_served(config: RunConfig, device: Device, sizes: ModelSizes) -> None:
    """Raise ModelError if the engine cannot sample from the model: a model of the hub is known only when it is here."""
    if what := unserved(Resolved(config, device), sizes):
        raise ModelError(what)


def _what_takes_less(memory: Memory) -> str:
    """Return the remedy of a peak, by the side that makes it."""
    if memory.engine and memory.peak > sum(memory.trainer.values()):
        return "; a lower generation.gpu_memory_utilization takes less"
    return (
        "; smaller packs (trainer.micro_batch_tokens), trainer.activation_checkpointing, more ranks, or "
        "trainer.backend=megatron with optimizer_cpu_offload take less"
    )


def _notes(resolved: Resolved, updates: int, memory: Memory | None, gpus: int) -> list[str]:
    config, notes = resolved.config, []
    metric = config.checkpoint.metric
    if not resolved.validates:
        notes.append("nothing is validated: it needs data.validation and validation.every")
        if config.checkpoint.keep_best and metric.lstrip("-").startswith("validation/"):
            notes.append(f"{metric} is never measured: no best checkpoint is kept")
    warmup = config.trainer.optimizer.warmup_steps
    if warmup >= updates:
        notes.append(f"warm-up takes {warmup} updates, the run only {updates}: lr is never reached")
    moves = (config.trainer.offload_optimizer_for_logprob, config.trainer.offload_optimizer_for_generation)
    if gpus == 0 and any(moves):
        notes.append("nothing is offloaded on a CPU: optimizer state is in host memory at all times")
    if memory and memory.capacity and memory.peak > _TIGHT * memory.capacity:
        full = memory.peak / memory.capacity
        said = "above the device's memory: expect to run out of it"
        if full <= 1:
            said = f"{full:.0%} of the device's memory, and an estimate: it may run out"
        notes.append(f"the forecast is {said}{_what_takes_less(memory) if gpus else ''}")
    if memory and memory.kv_sequences == 0:
        notes.append("the key-value cache does not hold one sequence of the longest kind: raise its share")
    return notes
