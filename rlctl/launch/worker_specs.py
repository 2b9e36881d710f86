"""Specs of a run's trainer ranks and engines, built from its config and placement."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from rlctl.config.schema import CheckpointSection
from rlctl.generation.generator_pool import EngineSlot
from rlctl.generation.spec import EngineSpec, ForcedLengths, engine_kind, engine_options
from rlctl.launch.roles import RoleFiles
from rlctl.launch.runtime import Allocation
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.backend import backend_of
from rlctl.preflight.declared_columns import Role, RoleModel
from rlctl.preflight.machine import Device
from rlctl.preflight.memory import scoring_cache_tokens, token_bytes
from rlctl.preflight.placement import Placement, PlacementSlot, transport_of
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.preflight.trainer_settings import Dtype
from rlctl.preflight.written_roles import WrittenRole, longest_sequence_of
from rlctl.refit.refit import RefitOptions
from rlctl.telemetry.throughput import TrainingFlops
from rlctl.training.profile import ProfileSpec
from rlctl.training.rank_checkpoint import Copies
from rlctl.training.spec import TrainerSpec
from rlctl.training.trainer_worker import TrainerWorker
from rlctl.workers.group import WorkerSpec
from rlctl.workers.waits import Waits

# Tokens that an engine's longest sequence has beyond the longest request. Without them, Qwen3-8B under CUDA graphs
# ended in an illegal memory access (vLLM 0.25.1, H200, one run). With them the same requests succeeded.
_ROOM = 16
# Most sequences that an engine scores at a time. A step has tokens of a few: the others wait for their turn.
_SCORED_AT_A_TIME = 64


def trainer_specs(
    session: Session, settled: Settled, files: ModelFiles, roles: Mapping[Role, RoleModel], allocation: Allocation
) -> list[WorkerSpec]:
    """Return the spec of every trainer rank. roles: models of `settled.frozen_roles`."""
    config = settled.config
    # Optimizer state moves for generation only if engines share the device.
    for_engines = config.trainer.offload_optimizer_for_generation and settled.shares_devices
    spec = replace(
        trainer_spec(session, settled, files.folder, allocation),
        config=replace(settled.trainer, offload_optimizer_for_generation=for_engines),
        roles=roles,
        adapter_folder=files.adapter,
        base_name=None if config.model.random_init else files.base,
    )
    return rank_specs("trainer", spec, session, settled, allocation)


def trainer_spec(session: Session, settled: Settled, folder: str, allocation: Allocation) -> TrainerSpec:
    """Return the spec of rank 0 of a trainer whose first weights are in `folder`."""
    config = settled.config
    updates = config.telemetry.profile_updates
    profile = None
    if updates:
        first, last = updates
        profile = ProfileSpec(str(session.run_dir.path / "profile"), first, last)
    return TrainerSpec(
        config=settled.trainer,
        model_path=folder,
        tokenizer_path=config.model.tokenizer or folder,
        rank=0,
        world=config.trainer.num_ranks,
        init_method=f"tcp://{allocation.meeting_point()}",
        device="cpu" if allocation.placement.device == "cpu" else "cuda:0",
        # The trainer divides logits by the temperature, as engines do.
        temperature=settled.grpo.config.generation.temperature if settled.grpo else 1.0,
        total_updates=config.num_steps * config.step_shape.updates,
        seed=config.run.seed,
        profile=profile,
        roles={},
        copies=_copies(config.checkpoint),
    )


def rank_specs(
    name: str, template: TrainerSpec, session: Session, settled: Settled, allocation: Allocation
) -> list[WorkerSpec]:
    """Return the worker spec of each rank of a trainer. Rank i is in the slot of the trainer's rank i.

    name: of the processes, before their number. template: spec of rank 0.
    """
    placement = allocation.placement
    specs = []
    for rank, slot in enumerate(placement.trainers[: template.world]):
        ranks_there, engines_there = placement.processes_on(slot.node)
        threads = settled.trainer_threads(allocation.cores(slot), ranks_there, engines_there)
        spec = replace(template, rank=rank, config=replace(template.config, threads=threads))
        env = trainer_environment(allocation.devices(slot), threads) | allocation.environment(slot)
        log = f"{session.logs}/{name}-{rank}.log"
        make = partial(TrainerWorker, spec)
        specs.append(WorkerSpec(f"{name}-{rank}", make, env, log, node=allocation.node(slot), waits=session.waits))
    return specs


def _copies(section: CheckpointSection) -> Copies:
    """Return the parts of a checkpoint that ranks copy to host memory to write them while training goes on."""
    if not (section.beside_training and (section.every or section.at_end)):
        return "nothing"
    return "state and export" if section.export else "state"


def training_cost(files: ModelFiles, facts: dict[str, Any]) -> tuple[str, TrainingFlops]:
    """Return the trainer's device name, and the FLOPs to train one token. facts: result of `TrainerGroup.info()`."""
    flops = TrainingFlops(facts["active_parameters"], files.facts.attention, facts["adapter_parameters"])
    return facts["device_name"], flops


def engine_slots(settled: SettledGrpo, allocation: Allocation, waits: Waits) -> list[EngineSlot]:
    """Return the node and environment of each engine. waits: explains slow calls to the user."""
    # By ipc an engine maps memory of the trainer's GPUs, so that its process must see them.
    reads_peers = transport_of(settled, allocation.placement) == "ipc"
    return _engine_slots(settled, allocation.placement.engines, allocation, waits, reads_peers=reads_peers)


def _engine_slots(
    settled: SettledGrpo, slots: Sequence[PlacementSlot], allocation: Allocation, waits: Waits, *, reads_peers: bool
) -> list[EngineSlot]:
    """Return the node and environment of the engine in each slot. reads_peers: it sees the trainer's GPUs too."""
    engine_environment = engine_kind(settled.config.generation.engine.name).environment
    device = allocation.placement.device
    engine_slots = []
    for slot in slots:
        peers = allocation.peer_devices(slot) if reads_peers else []
        env = engine_environment(device, allocation.devices(slot), peers) | allocation.environment(slot)
        engine_slots.append(EngineSlot(env, allocation.node(slot), waits))
    return engine_slots


def engine_spec(settled: SettledGrpo, files: ModelFiles, stops: tuple[int, ...], placement: Placement) -> EngineSpec:
    """Return the spec of the run's engines, the same for all. stops: ids of the tokens that end an answer."""
    config = settled.config
    generation = settled.generation
    longest = settled.max_length
    if config.data.max_prompt_length:
        longest = min(longest, config.data.max_prompt_length + generation.max_new_tokens + _ROOM)
    return EngineSpec(
        kind=generation.engine.name,
        options=engine_options(generation.engine, placement.device),
        model_path=files.folder,
        dtype=generation.dtype,
        device=placement.device,
        max_model_len=longest,
        tensor_parallel_size=generation.tensor_parallel_size,
        max_num_seqs=generation.max_num_seqs,
        gpu_memory_utilization=generation.gpu_memory_utilization,
        kv_cache_mib=generation.cache_mib,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=stops,
        sleeps=placement.shared and placement.device != "cpu" and generation.sleep,
        seed=config.run.seed,
        load_format="auto",
        prefix_caching=generation.prefix_caching,
        reset_prefix_cache=generation.reset_prefix_cache_after_weight_updates,
        recompute_kv_cache=config.async_.recompute_kv_cache_after_weight_updates,
        forced_lengths=ForcedLengths(*generation.forced_lengths) if generation.forced_lengths else None,
        adapters=settled.adapters or files.adapters,
        # If the run trains adapters, a refit sends them to the engine.
        adapter_folder=None if settled.adapters else files.adapter,
    )


def scoring_spec(sampler: EngineSpec, role: WrittenRole, files: RoleFiles) -> EngineSpec:
    """Return the spec of the engines that score with a role's model, the same for all. sampler: the run's engines."""
    sizes = files.facts.sizes
    assert sizes is not None
    longest = longest_sequence_of(role, sizes, sampler.max_model_len)
    size = role.tensor_parallel_size if sampler.device == "cuda" else 1
    token = token_bytes(sizes, cast(Dtype, sampler.dtype), size)
    cache_bytes = scoring_cache_tokens(cast(Device, sampler.device), longest) * token
    return replace(
        sampler,
        model_path=files.folder,
        max_model_len=longest,
        tensor_parallel_size=size,
        max_num_seqs=_SCORED_AT_A_TIME,
        # A model without attention has states instead of keys.
        kv_cache_mib=(cache_bytes >> 20) + 1 if token else sampler.kv_cache_mib,
        stop_token_ids=(),
        sleeps=False,
        load_format="auto",
        prefix_caching=False,
        forced_lengths=None,
        version=0,
        adapters=None,
        adapter_folder=None,
        scores=not role.has_value_head,
        values=role.has_value_head,
    )


def judge_spec(sampler: EngineSpec, role: WrittenRole, files: RoleFiles, stops: tuple[int, ...]) -> EngineSpec:
    """Return the spec of the engines that serve a judge. stops: ids of the tokens that end its replies."""
    spec = scoring_spec(sampler, role, files)
    return replace(spec, stop_token_ids=stops, top_p=1.0, top_k=0, scores=False)


def scoring_slots(
    settled: SettledGrpo, slots: Sequence[PlacementSlot], allocation: Allocation, waits: Waits
) -> list[EngineSlot]:
    """Return the node and environment of each engine that scores. slots: where the engines of one role are."""
    return _engine_slots(settled, slots, allocation, waits, reads_peers=False)


def refit_options(settled: SettledGrpo, placement: Placement, folder: str) -> RefitOptions:
    """Return the options of a refit for this placement. Each `auto` has a value, except `mode`: it depends on free
    memory.
    """
    config = settled.config
    refit = config.refit
    is_single = config.trainer.num_ranks == config.generation.num_engines * config.generation.tensor_parallel_size == 1
    return RefitOptions(
        kind=transport_of(settled, placement),
        dtype=settled.generation_dtype,
        mode=refit.mode,
        num_buffers=refit.num_buffers,
        buffer_memory_ratio=refit.buffer_memory_ratio,
        timeout_s=refit.timeout_s,
        folder=folder,
        checks=settled.checksum,
        # Not with adapters: they are small tensors, and one kernel packs them all.
        colocated=placement.shared and placement.device != "cpu" and not config.lora and is_single,
        in_flight=config.async_.enabled and config.async_.in_flight_weight_updates,
        adapters=config.lora is not None,
        ranks_a_copy=backend_of(settled.trainer).ranks_a_copy(settled.trainer) if len(placement.used_nodes) > 1 else 0,
    )


def trainer_environment(devices: list[str], threads: int) -> dict[str, str]:
    """Return the environment variables of a trainer rank's process. devices: its GPUs; empty on a CPU."""
    # PASSIVE: waiting OpenMP threads sleep. On a busy machine spinning threads take cores from each other, and a step
    # of 0.4 s took 2 to 3 s. On an idle machine both are equally fast.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if devices:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        env |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return env
