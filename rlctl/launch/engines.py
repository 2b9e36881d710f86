"""Engines without a trainer: Ray and engines on this machine, with the weights of a folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.launch.local_ray import local_ray
from rlctl.launch.runtime import Allocation
from rlctl.launch.worker_imports import preload_workers
from rlctl.launch.worker_specs import engine_slots, engine_spec
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import ResourceRequest, place, this_machine
from rlctl.preflight.plan import require_served
from rlctl.preflight.settled import SettledGrpo
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.utils.devices import count_gpus, device_memory
from rlctl.utils.event_loop import EventLoop
from rlctl.workers.user_logs import Emit
from rlctl.workers.waits import Waits


@contextmanager
def engines(
    settled: SettledGrpo,
    files: ModelFiles,
    stops: tuple[int, ...],
    version: int,
    logs: Path,
    emit: Emit,
    events: EventLoop | None,
) -> Iterator[RolloutDispatcher]:
    """Run `generation.num_engines` engines with the weights of `files` until the block is left.

    Yields the dispatcher of rollouts. stops: ids of the tokens that end an answer. version: weight version to record
    with every sampled token. events: event loop of the environments; None without environments. Raises PlacementError,
    with the arithmetic, if there are too few devices.
    """
    config = settled.config
    generation = config.generation
    request = ResourceRequest(
        0,
        generation.num_engines,
        generation.tensor_parallel_size,
        colocated=False,
        cpus_per_process=config.placement.cpus_per_process,
    )
    placement = place(this_machine(count_gpus()), request)
    memory = device_memory() if placement.device == "cuda" else None
    # Without a trainer the engines share their devices with nobody.
    config = replace(config, placement=replace(config.placement, colocated=False))
    machine = RunMachine(placement.device, memory)
    settled = replace(settled, config=config, machine=machine, facts=files.facts.sizes)
    require_served(settled)
    if files.adapter and not engine_rules(generation.engine).serves_adapters:
        raise ModelError(f"generation.engine={generation.engine.name} serves no adapters, and {files.adapter} is one")
    with ExitStack() as stack:
        forks = stack.enter_context(preload_workers(placement, None, generation.engine.name, logs))
        reaper = stack.enter_context(local_ray(logs, deadline_s=config.run.deadline_s, forks=forks))

        def make_folder(prefix: str, root: str | None) -> str:
            return str(stack.enter_context(reaper.folder(prefix, root)))

        allocation = Allocation(placement, [None], make_folder)
        waits = Waits(config.run.explain_after_s, lambda text: emit("warning", what=text))
        stack.callback(waits.close)
        spec = replace(engine_spec(settled, files, stops, placement), version=version)
        slots = engine_slots(settled, allocation, waits)
        pool = GeneratorPool(spec, slots, str(logs), config.run.deadline_s, generation.max_restarts, emit)
        stack.callback(pool.kill)
        pool.wait_until_built()
        dispatcher = RolloutDispatcher(pool, config.run, emit, events, waits_for_all=True)
        stack.callback(dispatcher.close)
        yield dispatcher
