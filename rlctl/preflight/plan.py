"""Plan of a run, computed from its config as plain data. `--dry-run` shows the plan.

Pure: the model's sizes and the machine are arguments. Units are bytes and tokens. A value is None if it cannot be
computed, for example because the model's config.json is not on this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlctl.config.errors import ModelError
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, backend_of, layout_of
from rlctl.preflight.check_model import model_notes
from rlctl.preflight.critic import (
    PlacedStates,
    add_critic_on_cpu,
    critic_bytes_on_cpu,
    critic_note,
    critic_settings,
    critic_sizes,
)
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.memory import (
    REFIT_GROUPS,
    Memory,
    communicator_bytes,
    copied_bytes,
    engine_items,
    placed_states,
    refit_bytes,
    show_bytes,
    token_bytes,
    trainer_bytes,
)
from rlctl.preflight.parallel_layout import Layout
from rlctl.preflight.placement import (
    NodeResources,
    Placement,
    PlacementError,
    place,
    refit_way,
    requested_resources,
    transport_of,
)
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Choice


@dataclass(frozen=True)
class BatchSize:
    """Numbers of prompts, rollouts, sequences and tokens in one step."""

    prompts: int
    group: int
    rollouts: int
    updates: int
    per_update: int
    # Most sequences that a rank trains in an update. All ranks of a shard train the same sequences.
    per_rank: int
    # Tokens of the longest allowed sequence.
    longest: int | None
    # Most tokens in one step.
    tokens: int | None
    # Number of sequences of that length in one micro-batch.
    full_sequences: int | None
    # Most micro-batches that a rank needs for one update.
    micro_batches: int | None


@dataclass(frozen=True)
class Schedule:
    """Numbers of steps, updates, validations and checkpoints of the run."""

    steps: int
    updates: int
    validations: int
    checkpoints: int
    kept: int
    # Bytes of one checkpoint with its export.
    checkpoint_bytes: int | None
    # Free bytes for checkpoints on the run's disk; None: not known.
    disk_free: int | None = None

    @property
    def disk_bytes(self) -> int:
        """Most bytes that checkpoints take on the disk; 0 if not known. One more than `kept` counts: a new checkpoint
        is complete before an old one is deleted.
        """
        return min(self.checkpoints, self.kept + 1) * (self.checkpoint_bytes or 0)


@dataclass(frozen=True)
class RunPlan:
    """Everything that a dry run shows."""

    kind: str
    model: str
    parameters: int | None
    # None if the run does not fit the devices; then `misplaced` has the reason.
    placement: Placement | None
    misplaced: str | None
    # None for a backend that has one layout.
    layout: Layout | None
    batch: BatchSize
    memory: Memory | None
    # Reason why weights, gradients and optimizer state exceed a device's memory. It uses exact sizes only. None if they
    # fit.
    too_large: str | None
    # Role -> reason why there is no room for its model in its place.
    unplaced: dict[str, str]
    # Reason why the engine cannot sample from the model on this device; None if it can.
    unserved: str | None
    # Reason why the first checkpoint does not fit on the disk; None if it does.
    unsaved: str | None
    schedule: Schedule
    # Bytes that a refit sends to each engine, and the transport as text, if they are known.
    refit: int | None
    refit_way: str | None
    # Values of the keys that were left at `auto`, with reasons.
    chosen: tuple[Choice, ...]
    notes: list[str]


# Share of a device's memory above which a forecast gets a note, because it is only an estimate.
_TIGHT = 0.93


def make_plan(
    settled: Settled, nodes: Sequence[NodeResources], disk_free: int | None = None, cores: int | None = None
) -> RunPlan:
    """Return the plan of a run on `nodes`: this machine alone, or the nodes of a cluster.

    disk_free: free bytes for checkpoints; None: not known. cores: number of cores of this machine; None on a cluster.
    """
    config = settled.config
    facts = settled.facts
    backend = backend_of(config.trainer)
    placement = None
    placement_error = None
    refit_route = None
    try:
        placement = place(nodes, requested_resources(settled), settled.device)
        # The placement decides how many ranks share a node. Values that depend on that are settled again.
        machine = replace(settled.machine, ranks_by_node=placement.ranks_by_node)
        settled = settled.settle_on(machine, facts)
        if settled.sampling:
            refit_route = refit_way(settled.sampling, placement)
    except PlacementError as error:
        # `refit_way` refuses placements too: one that it refuses is none.
        placement = None
        placement_error = str(error)
    sampling = settled.sampling
    memory = forecast(settled, placement)
    schedule = _make_schedule(settled, disk_free)
    return RunPlan(
        kind=config.kind,
        model=config.model.path,
        parameters=facts.parameters if facts else None,
        placement=placement,
        misplaced=placement_error,
        layout=backend.layout(config.trainer) if backend.has_layouts else None,
        batch=_batch_size(settled),
        memory=memory,
        too_large=_why_too_large(settled, memory) if settled.device == "cuda" else None,
        unplaced={role.name: role.problem for role in settled.placed_roles.values() if role.problem},
        unserved=_why_unserved(settled),
        unsaved=_why_unsaved(schedule),
        schedule=schedule,
        refit=refit_bytes(facts, sampling.generation_dtype, settled.adapters) if facts and sampling else None,
        refit_way=refit_route,
        chosen=settled.choices,
        notes=_plan_notes(settled, schedule, memory) + _scoring_notes(settled) + crowding_notes(settled, cores),
    )


def _scoring_notes(settled: Settled) -> list[str]:
    """Return a note for each role on engines: its devices, and the bytes of each. The critic has one too."""
    roles = settled.placed_roles.values()
    notes = [f"{role.name} on engines: {role.reason}" for role in roles if role.place == "engines"]
    note = critic_note(settled)
    return notes if note is None else [*notes, note]


def forecast(settled: Settled, placement: Placement | None = None) -> Memory | None:
    """Return the forecast of a run's memory; None until the model's sizes are known.

    placement: if given, the refit's communicators count too. On a CPU all ranks and engines share the machine's memory
    at all times, so their sum is the forecast.
    """
    sizes = settled.facts
    device = settled.device
    sampling = settled.sampling
    if sizes is None:
        return None
    trainer_items = trainer_bytes(settled.trainer, sizes, device, settled.held_roles)
    if device == "cpu":
        trainer_items |= critic_bytes_on_cpu(settled)
    host_items = _checkpoint_copies(settled, sizes)
    if device == "cpu":
        trainer_items |= host_items
        host_items = {}
    without_engines = Memory(
        trainer=trainer_items,
        engine={},
        capacity=settled.machine.memory,
        shared=False,
        awake=False,
        kv_sequences=None,
        placed_states=_place_states(settled, sizes),
        host=host_items,
    )
    if sampling is None:
        return without_engines
    generation = sampling.generation
    longest = sampling.longest_sequence
    engine_bytes = engine_items(generation, sizes, device, settled.machine.memory)
    per_token = token_bytes(sizes, generation.dtype, generation.tensor_parallel_size)
    cache_bytes = engine_bytes.get("key-value cache")
    kv_sequences = None
    if cache_bytes is not None and longest and per_token:
        kv_sequences = cache_bytes // (per_token * longest)
    if device == "cpu":
        # One machine holds every rank and every engine, all awake.
        all_items = {name: size * settled.config.trainer.num_ranks for name, size in trainer_items.items()}
        all_items |= {f"engines: {name}": size * generation.num_engines for name, size in engine_bytes.items()}
        for role in settled.placed_roles.values():
            if role.engines_bytes:
                all_items[f"engines of the {role.name}"] = role.engines_bytes
        return replace(without_engines, trainer=all_items, kv_sequences=kv_sequences)
    if placement and (groups := refit_groups(sampling, placement)):
        communicator = communicator_bytes(len(placement.used_nodes))
        trainer_items["refit's communicator"] = communicator
        engine_bytes["refit's communicators"] = groups * communicator
    return replace(
        without_engines,
        trainer=trainer_items,
        engine=engine_bytes,
        shared=settled.shares_devices,
        awake=not generation.sleep,
        kv_sequences=kv_sequences,
    )


def _place_states(settled: Settled, sizes: ModelSizes) -> PlacedStates:
    """Return phase -> state or role -> its place and bytes for one rank."""
    placed = placed_states(
        trainer=settled.trainer,
        sizes=sizes,
        device=settled.device,
        shared=settled.shares_devices,
        phases=settled.phases,
        frozen=settled.held_roles,
    )
    return add_critic_on_cpu(settled, placed) if settled.device == "cpu" else placed


def refit_groups(settled: SettledGrpo, placement: Placement) -> int:
    """Return the number of refit communicators on an engine's device; 0 if the refit is not by broadcast."""
    if placement.device == "cpu" or transport_of(settled, placement) != "broadcast":
        return 0
    return min(REFIT_GROUPS, refit_senders(settled, placement))


def refit_senders(settled: Settled, placement: Placement) -> int:
    """Return the number of ranks that send weights in a refit: on one node all, on several the ranks of one copy."""
    trainer = settled.trainer
    return backend_of(trainer).ranks_a_copy(trainer) if len(placement.used_nodes) > 1 else trainer.num_ranks


def _checkpoint_copies(settled: Settled, sizes: ModelSizes) -> dict[str, int]:
    """Return purpose -> bytes of host memory that a rank needs for a checkpoint written while training goes on."""
    section = settled.config.checkpoint
    saves = section.beside_training and (section.every or section.at_end)
    return {"copies of a checkpoint": copied_bytes(settled.trainer, sizes)} if saves else {}


def _batch_size(settled: Settled) -> BatchSize:
    step = settled.config.step_shape
    longest = settled.longest_sequence
    trainer = settled.trainer
    rollouts = step.prompts * step.group
    per_rank = -(-step.per_update // layout_of(trainer).data)
    full_sequences = trainer.micro_batch_tokens // longest if longest else None
    return BatchSize(
        prompts=step.prompts,
        group=step.group,
        rollouts=rollouts,
        updates=step.updates,
        per_update=step.per_update,
        per_rank=per_rank,
        longest=longest,
        tokens=rollouts * longest if longest else None,
        full_sequences=full_sequences,
        micro_batches=-(-per_rank // full_sequences) if full_sequences else None,
    )


def _make_schedule(settled: Settled, disk_free: int | None) -> Schedule:
    config = settled.config
    steps = config.num_steps
    validations = 0
    if settled.validates:
        # The last step is always followed by a validation.
        validations = config.validation.at_start + -(-steps // config.validation.every)
    interval = config.checkpoint.every
    checkpoints = steps // interval if interval else 0
    if config.checkpoint.at_end and (not interval or steps % interval > 0):
        checkpoints += 1
    return Schedule(
        steps=steps,
        updates=steps * config.step_shape.updates,
        validations=validations,
        checkpoints=checkpoints,
        kept=min(checkpoints, config.checkpoint.keep_last + config.checkpoint.keep_best),
        checkpoint_bytes=_checkpoint_bytes(settled),
        disk_free=disk_free,
    )


def _checkpoint_bytes(settled: Settled) -> int | None:
    """Return the bytes of a checkpoint with its export; None until the model's sizes are known.

    A checkpoint has weights and AdamW's two moments in float32, and the exported weights. With adapters it has only
    those of the adapters, all in float32. The critic's are like the policy's.
    """
    if settled.facts is None:
        return None
    parameters = settled.facts.parameters
    exported_bytes = DTYPE_BYTES[settled.export_dtype]
    if settled.adapters:
        parameters = settled.adapters.parameters
        exported_bytes = FLOAT32
    parameter_bytes = 3 * FLOAT32
    if settled.config.checkpoint.export:
        parameter_bytes += exported_bytes
    critic = critic_sizes(settled)
    if critic is None:
        return parameters * parameter_bytes
    critic_bytes_each = 3 * FLOAT32 + (DTYPE_BYTES[settled.export_dtype] if settled.config.checkpoint.export else 0)
    return parameters * parameter_bytes + critic.parameters * critic_bytes_each


def _why_too_large(settled: Settled, memory: Memory | None) -> str | None:
    """Return why a device cannot hold weights, gradients and optimizer state, the exact part of the forecast; None if
    it can.
    """
    if memory is None or memory.capacity is None or memory.state_peak <= memory.capacity:
        return None
    state_gib = f"{memory.state_peak / 2**30:.1f} GiB"
    device_gib = f"{memory.capacity / 2**30:.1f} GiB"
    advice = backend_of(settled.trainer).more_room(settled.trainer, memory.state_peak, memory.capacity)
    problem = f"weights, gradients and optimizer state alone take {state_gib} of each device, which has {device_gib}"
    share = "; the weights of the critic are among them" if critic_settings(settled) else ""
    return f"{problem}{share}; {advice}"


def _why_unsaved(schedule: Schedule) -> str | None:
    """Return why the first checkpoint would not fit on the disk; None if it fits, or if a size is not known."""
    size = schedule.checkpoint_bytes
    free = schedule.disk_free
    if not schedule.checkpoints or size is None or free is None or size <= free:
        return None
    problem = f"a checkpoint takes {show_bytes(size)}, and {show_bytes(free)} are free here"
    return f"{problem}: make room, or set another run.dir"


def disk_notes(schedule: Schedule) -> list[str]:
    """Return a note if one checkpoint fits on the disk, but not as many as are kept."""
    free = schedule.disk_free
    needed_bytes = schedule.disk_bytes
    if free is None or needed_bytes <= free or _why_unsaved(schedule):
        return []
    remedy = "a lower checkpoint.keep_last or keep_best takes less"
    return [f"checkpoints take up to {show_bytes(needed_bytes)}, and {show_bytes(free)} are free in run.dir: {remedy}"]


def _why_unserved(settled: Settled) -> str | None:
    """Return why the engine cannot sample from the model on this device; None if it can, or if that is not known."""
    sampling = settled.sampling
    if sampling is None or settled.facts is None:
        return None
    rules = engine_rules(sampling.config.generation.engine)
    return rules.find_refusal(settled.device, sampling.config.model.path, settled.facts)


def require_served(settled: Settled) -> None:
    """Raise ModelError if the engine cannot sample from the model.

    Runs call this once a model of the hub is downloaded, because checks before that do not know its sizes.
    """
    if reason := _why_unserved(settled):
        raise ModelError(reason)


def _peak_remedy(memory: Memory) -> str:
    """Return the remedy for a memory peak: keys of the engine or of the trainer, whichever has the peak."""
    if memory.engine and memory.peak > sum(memory.trainer.values()):
        return "; a lower generation.gpu_memory_utilization takes less"
    return (
        "; smaller packs (trainer.micro_batch_tokens), trainer.activation_checkpointing, more ranks, or "
        "trainer.backend=megatron with optimizer_cpu_offload take less"
    )


def crowding_notes(settled: Settled, cores: int | None) -> list[str]:
    """Return a note if more processes compute at one time than there are cores. cores: None: not known."""
    ranks = settled.config.trainer.num_ranks
    engines = settled.sampling.generation.num_engines if settled.sampling else 0
    # Ranks and engines compute in turns, so only the larger of the two groups competes for cores.
    processes = max(ranks, engines)
    if settled.device != "cpu" or cores is None or processes <= cores:
        return []
    key = "trainer.num_ranks" if ranks == processes else "generation.num_engines"
    core_count = "1 core" if cores == 1 else f"{cores} cores"
    problem = f"{processes} processes take turns on {core_count}, and each has a copy of the libraries"
    return [f"{key}={processes}: {problem}; {key}={cores} is faster"]


def _plan_notes(settled: Settled, schedule: Schedule, memory: Memory | None) -> list[str]:
    config = settled.config
    on_cpu = settled.device == "cpu"
    notes = model_notes(settled.facts, settled.device) if settled.facts else []
    metric = config.checkpoint.metric
    if not settled.validates:
        notes.append("nothing is validated: it needs data.validation and validation.every")
        if config.checkpoint.keep_best and metric.lstrip("-").startswith("validation/"):
            notes.append(f"{metric} is never measured: no best checkpoint is kept")
    warmup = config.trainer.optimizer.warmup_steps
    if warmup >= schedule.updates:
        notes.append(f"warm-up takes {warmup} updates, the run only {schedule.updates}: lr is never reached")
    notes += disk_notes(schedule)
    moves = (config.trainer.offload_optimizer_for_logprob, config.trainer.offload_optimizer_for_generation)
    if on_cpu and any(moves):
        notes.append("nothing is offloaded on a CPU: optimizer state is in host memory at all times")
    if memory and memory.capacity and memory.peak > _TIGHT * memory.capacity:
        used_share = memory.peak / memory.capacity
        verdict = "above the device's memory: expect to run out of it"
        if used_share <= 1:
            verdict = f"{used_share:.0%} of the device's memory, and an estimate: it may run out"
        notes.append(f"the forecast is {verdict}{'' if on_cpu else _peak_remedy(memory)}")
    if memory and memory.kv_sequences == 0:
        notes.append("the key-value cache does not hold one sequence of the longest kind: raise its share")
    return notes
