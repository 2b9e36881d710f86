"""Brings a GRPO run to life: data, Ray, trainer ranks and engines come up together, then the loop."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.data.load import RowReader
from rlctl.launch.loading import PromptLoading
from rlctl.launch.runtime import Allocation, Runtime
from rlctl.launch.session import Session, run_session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.placement import Placement, resources
from rlctl.run.fingerprint import made_with
from rlctl.utils.process import identity
from rlctl.workers.reaper import SHARED_MEMORY, free_bytes

if TYPE_CHECKING:
    from rlctl.grpo.components import Devices, GrpoComponents
    from rlctl.rewards.scorer import Scorer
    from rlctl.workers.group import WorkerGroup

# Room in shared memory beside the weights in transit, for what else a run keeps there.
_BESIDE_BYTES = 16 << 20


def run_grpo(
    config: RunConfig,
    resolved: str,
    runtime: Runtime,
    resume: Path | None = None,
    probe_only: bool = False,
    reader: RowReader | None = None,
) -> int:
    """`rlctl train grpo`: returns the exit code. reader: holds the rows if they were read already."""
    reader = reader or RowReader(config)
    return run_session(
        config, resolved, resume, lambda session: _grpo(session, runtime, reader, probe_only), runtime.refuse
    )


def _grpo(session: Session, runtime: Runtime, reader: RowReader, probe_only: bool) -> None:
    config = session.config
    assert isinstance(config, GrpoConfig)
    files = ModelFiles.find(config.model, session.run_dir.path, config.run.seed)
    session.depend_on(made_with(config, Path(files.source)))
    from rlctl.rewards.scorer import Scorer

    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config.rewards, session.logs, session.events.emit))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        loading: list[PromptLoading] = []

        def begin(placement: Placement) -> None:
            announce(session, config, config.grpo.num_steps, placement)
            loading.append(PromptLoading.begin(threads, session, config, files, reader.take(), scorer))

        allocation = stack.enter_context(runtime.allocation(session, resources(config), begin))
        if loading[0].prompts.done():
            # What is wrong with data or rewards is known by now, as a rule.
            loading[0].prompts.result()
        _assembled(stack, allocation, session, config, files, loading[0], scorer, probe_only)


def _assembled(
    stack: ExitStack,
    allocation: Allocation,
    session: Session,
    config: GrpoConfig,
    files: ModelFiles,
    loading: PromptLoading,
    scorer: "Scorer",
    probe_only: bool,
) -> None:
    from rlctl.data.cursor import Cursor, PromptSource
    from rlctl.generation.pool import GeneratorPool
    from rlctl.grpo.components import GrpoComponents
    from rlctl.grpo.parity_check import probe
    from rlctl.launch.worker_specs import engine_slots, engine_spec, refit_options, start_trainers
    from rlctl.refit.refit import Refit
    from rlctl.rollout.scoring import GroupScorer
    from rlctl.telemetry.resource_monitor import ResourceMonitor
    from rlctl.training.trainer_group import TrainerGroup

    events, generation, placement = session.events, config.generation, allocation.placement
    updates = config.grpo.num_steps * config.grpo.updates_per_step
    group = start_trainers(session, config, files, allocation, updates, generation.temperature)
    stack.callback(group.kill)
    chat, ends = loading.chat.result()
    spec = engine_spec(config, files, ends.stops, placement)
    pool = GeneratorPool(
        spec,
        engine_slots(config, allocation, session.waits),
        str(session.logs),
        config.run.deadline_s,
        generation.max_restarts,
        events.emit,
    )
    stack.callback(pool.kill)
    prompts = loading.prompts.result()
    with session.starting("trainer"):
        group.built().wait(config.run.deadline_s)
    with session.starting("generator"):
        for pending in pool.built():
            pending.wait(config.run.deadline_s)
    events.emit("processes", **{worker.name: worker.pid() for worker in (*group.workers, *pool.engines)})
    source = PromptSource(prompts.train, Cursor(len(prompts.train), config.run.seed, config.data.shuffle))
    if session.checkpoint:
        group.call("load", str(session.checkpoint.trainer))
        source.cursor.load_state_dict(session.checkpoint.state["cursor"])
    trainer = TrainerGroup(group, config.trainer)
    with session.starting("refit"):
        folder = _transit(session, allocation, trainer.info(), spec.dtype) if len(placement.used) == 1 else ""
        refit = Refit(group, refit_options(config, placement, spec.dtype, folder))
        pool.open_refit(refit)
    stack.push(closing(group))
    score = GroupScorer(scorer, _decoder(chat.tokenizer))
    devices = _devices(placement, trainer.info(), files)
    memories = {"trainer": lambda: group.call("memory"), "engine": lambda: pool.call("memory")}
    monitor = ResourceMonitor(placement.device, memories)
    parts = GrpoComponents(trainer, pool, refit, source, prompts.validation, score, session.recorder, devices, monitor)
    if config.run.probe or probe_only:
        with session.starting("probe"):
            gap = probe(config, parts, prompts.validation or prompts.train, session.start, spec.dtype)
        events.emit("probe", **vars(gap))
    else:
        pool.refit(refit, session.start)
    if not probe_only:
        _train(stack, session, config, parts)


def closing(group: "WorkerGroup") -> Callable[[Any, Any, Any], None]:
    """The ranks' end after work that went well; after a failure they may not answer, and are killed."""

    def close(kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            group.call("close")

    return close


def _devices(placement: Placement, facts: dict[str, Any], files: ModelFiles) -> "Devices":
    """facts: of `TrainerGroup.info`."""
    from rlctl.grpo.components import Devices

    devices = (placement.trainer_devices, placement.generator_devices, placement.all_devices)
    return Devices(*devices, *training_cost(facts, files))


def training_cost(facts: dict[str, Any], files: ModelFiles) -> tuple[str, Callable[[float], float]]:
    """Name of the trainer's device, and FLOPs a token by sequence length. facts: of `TrainerGroup.info`."""
    from rlctl.telemetry.throughput import flops_per_token

    return facts["device_name"], partial(flops_per_token, facts["active_parameters"], files.layers, files.hidden)


def _train(stack: ExitStack, session: Session, config: GrpoConfig, parts: "GrpoComponents") -> None:
    """The steps that are left, from the checkpoint on if there is one."""
    from rlctl.grpo.loop import GrpoLoop

    loop = GrpoLoop(config, parts, session.stops)
    stack.callback(loop.close)
    session.waits.where = lambda: f"trainer at version {loop.done}, engines at version {parts.pool.version}"
    if session.checkpoint:
        loop.resume(session.checkpoint)
    session.go_on()
    loop.run(session.start)


def shared_memory(nbytes: int = 0) -> str | None:
    """Return the folder for weights in transit: in memory, where there is room for as many bytes."""
    return str(SHARED_MEMORY) if free_bytes(SHARED_MEMORY) > nbytes else None


def _transit(session: Session, allocation: Allocation, facts: dict[str, Any], dtype: str) -> str:
    """Return a new folder for weights in transit, which stand there twice. facts: of `TrainerGroup.info`."""
    nbytes = 2 * int(facts["parameters"]) * (4 if dtype == "float32" else 2)
    root = shared_memory(nbytes + _BESIDE_BYTES) if allocation.placement.device == "cpu" else shared_memory()
    if root is None:
        has, needs = f"{free_bytes(SHARED_MEMORY) >> 20} MiB free", f"2 x {nbytes >> 21} MiB"
        what = f"{SHARED_MEMORY} has {has}, weights in transit take {needs}: they go through the disk, which is slower"
        session.events.emit("warning", what=f"{what}; in a container: docker run --shm-size=2g")
    return allocation.folder(f"rlctl-{session.run_dir.name}-", root)


def announce(session: Session, config: RunConfig, num_steps: int, placement: Placement) -> None:
    """The run_started event."""
    session.events.emit(
        "run_started",
        name=session.run_dir.name,
        algorithm=config.kind,
        model=config.model.path,
        num_steps=num_steps,
        start_step=session.start,
        attempt=session.run_dir.attempt,
        damaged=list(session.damaged.values()),
        **processes_of(placement),
        **identity(),
    )


def processes_of(placement: Placement) -> dict[str, Any]:
    """How many ranks and engines a run has, and the devices of each side: fields of its run_started event."""
    return {
        "device": placement.device,
        "devices": {"trainer": placement.trainer_devices, "generator": placement.generator_devices},
        "ranks": len(placement.trainers),
        "engines": len(placement.engines),
        "shared": placement.shared,
    }


def _decoder(tokenizer: Any) -> Any:
    fast = tokenizer.backend_tokenizer
    return lambda rows: fast.decode_batch(rows, skip_special_tokens=True)
