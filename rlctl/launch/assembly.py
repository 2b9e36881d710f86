"""Assembly of a run for any algorithm: it starts the parts in order, waits until they are ready, and ends them.

Read `assemble` and `_start` from top to bottom. However the run ends, the parts end in reverse order of their start. An
algorithm adds its own parts by `AlgorithmParts`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.config.errors import ModelError
from rlctl.config.schema import RunConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import RowSource
from rlctl.data.load_data import RowReader, RunRows
from rlctl.data.mixture import order_of
from rlctl.launch.assemble_grpo import GrpoParts
from rlctl.launch.assemble_sft import SftParts
from rlctl.launch.loading import RunData, load_chats, meanwhile
from rlctl.launch.precompile import precompile, precompiles
from rlctl.launch.prepare import PreparedRun
from rlctl.launch.roles import find_roles, role_models
from rlctl.launch.runtime import Allocation, Runtime
from rlctl.launch.sampling import SamplingParts, user_processes
from rlctl.launch.session import Session, run_session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.check_model import model_notes
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import Placement, requested_resources
from rlctl.preflight.plan import require_served
from rlctl.preflight.settled import Settled
from rlctl.run.checkpoints import Checkpoint, damage_of_weights, hold, stand_in
from rlctl.run.fingerprint import made_with
from rlctl.run.run_dir import RunDir
from rlctl.utils.process import identity
from rlctl.workers.user_logs import Emit

if TYPE_CHECKING:
    from rlctl.generation.generator_pool import GeneratorPool
    from rlctl.run.loop import Loop
    from rlctl.training.trainer_group import TrainerGroup
    from rlctl.workers.group import WorkerGroup


class AlgorithmParts(Protocol):
    """Parts of a run that depend on its algorithm. `assemble` calls each method once, in this order."""

    def load(self, chat: Chat, rows: RunRows) -> RunData[Any]:
        """Tokenize and check the rows. Runs on a separate thread. Raises DataError or RewardError."""

    def start_models(self, allocation: Allocation) -> "list[WorkerGroup]":
        """Start the algorithm's models besides policy and engines. Return their groups at once."""

    def make_loop(
        self, allocation: Allocation, trainer: "TrainerGroup", source: RowSource[Any], data: RunData[Any]
    ) -> "Loop | None":
        """Connect the started parts and check them. Return the training loop; None if only the check was requested."""


def launch(
    settled: Settled,
    resolved: str,
    runtime: Runtime,
    resume: Path | None = None,
    probe_only: bool = False,
    reader: RowReader | None = None,
    on_directory: Callable[[RunDir], None] | None = None,
) -> int:
    """Execute a run to its end and return the exit code. `launch_prepared` and the job on a cluster both call this.

    resolved: the config as YAML. resume: directory of the run to continue. probe_only: compare log-probs of trainer and
    generator, then stop. reader: has the rows if they were read already. on_directory: called once the run's directory
    exists. Raises RunDirError for a run that must not be continued on this machine.
    """
    if resume is not None:
        runtime.refuse(RunDir.open(resume))
    body = partial(assemble, settled, runtime, reader or RowReader(settled.config), probe_only)
    return run_session(settled, resolved, resume, body, on_directory)


def launch_prepared(
    prepared: PreparedRun,
    runtime: Runtime,
    probe_only: bool = False,
    on_directory: Callable[[RunDir], None] | None = None,
) -> int:
    """Read the rows of a planned run, execute the run to its end, and return the exit code.

    The command `rlctl train` and the function `rlctl.train` both call this. Raises ConfigError if the run does not fit
    its machine or cluster, or if rows are wrong. Raises MissingPackagesError, and RunDirError as `launch` does.
    """
    prepared.require_fit()
    prepared.progress.note(prepared.notes)
    prepared.advance("read")
    composed = prepared.composed
    return launch(
        composed.settled,
        composed.to_yaml(),
        runtime,
        resume=prepared.resumed.run if prepared.resumed else None,
        probe_only=probe_only,
        reader=prepared.reader,
        on_directory=on_directory,
    )


def assemble(settled: Settled, runtime: Runtime, reader: RowReader, probe_only: bool, session: Session) -> None:
    """Start the parts of a run, train to the last step, and end the parts.

    settled: settled without a machine. An interrupt ends the start-up at once, and the training loop after its step.
    """
    with ExitStack() as stack:
        with session.interrupts.ends_block():
            loop, group, pool = _start(settled, runtime, reader, probe_only, session, stack)
        if loop:
            session.waits.where = partial(_versions, loop, pool)
            with closing(loop):
                if session.checkpoint:
                    loop.resume(session.checkpoint)
                session.commit_attempt()
                session.end_start()
                loop.run(session.start)
        if pool:
            # Ranks free the refit's memory. After a failure this is not called, because ranks may not answer: they are
            # killed.
            from rlctl.training.trainer_worker import TrainerWorker

            group.call(TrainerWorker.close)


def _start(
    settled: Settled, runtime: Runtime, reader: RowReader, probe_only: bool, session: Session, stack: ExitStack
) -> "tuple[Loop | None, WorkerGroup, GeneratorPool | None]":
    """Start the parts; `stack` ends them. Return (loop or None if the run only probes, trainer ranks, engines)."""
    config = settled.config
    emit = session.events.emit
    files = find_model(config, session.run_dir, session.checkpoint)
    role_files = find_roles(settled, files, session.run_dir)
    session.depend_on(made_with(settled, Path(files.source)))
    processes = None
    if settled.sampling:
        processes = user_processes(settled.sampling.config, session.logs, session.run_dir.path, emit, stack)
    held_slots = stack.enter_context(runtime.slots(session, requested_resources(settled)))
    announce(session, held_slots.placement)
    role_facts = {name: role.facts for name, role in role_files.items()}
    placed = _settle(settled.settle_on(settled.machine, settled.facts, role_facts), held_slots.machine, files, emit)
    roles = role_models(placed, role_files)
    sampling = None
    if placed.sampling and processes:
        scorer, environments = processes
        sampling = SamplingParts(session, placed.sampling, files, scorer, environments)
    parts: AlgorithmParts
    if placed.grpo and sampling:
        parts = GrpoParts(session, placed.grpo, files, sampling, role_files, probe_only)
    else:
        assert placed.sft
        parts = SftParts(session, placed.sft, files, sampling)

    # The rows are tokenized while Ray starts. To start, engines need only the tokenizer's end tokens.
    chat_loading = meanwhile(stack, lambda: load_chats(session, placed, files, sampling))

    def load() -> RunData[Any]:
        chat, _ = chat_loading.result()
        return parts.load(chat, reader.take())

    loading = meanwhile(stack, load)
    allocation = stack.enter_context(runtime.allocation(session, held_slots))
    if loading.done():
        # An error in data or rewards is usually known by now.
        loading.result()

    # Trainer ranks and engines start at the same time. The slow imports are here, after the `run_started` event.
    from rlctl.launch.worker_specs import trainer_specs
    from rlctl.training.trainer_group import TrainerGroup
    from rlctl.training.trainer_worker import TrainerWorker
    from rlctl.workers.group import WorkerGroup

    specs = trainer_specs(session, placed, files, roles, allocation)
    group = WorkerGroup(specs, config.run.deadline_s)
    groups = [group, *parts.start_models(allocation)]
    for worker_group in groups:
        stack.callback(worker_group.kill)
    _, ends = chat_loading.result()
    session.recorder.end_tokens = ends.stops
    pool = sampling.start_engines(allocation) if sampling else None
    pools = [pool, *sampling.start_scoring(allocation, role_files)] if sampling and pool else []
    for engine_pool in pools:
        stack.callback(engine_pool.kill)
    data = loading.result()
    session.recorder.export_dtype = placed.export_dtype
    with session.starting("trainer"):
        for worker_group in groups:
            worker_group.built().wait(config.run.deadline_s)
    trainer = TrainerGroup(group, placed.trainer)
    if precompiles(placed) and not (pool and pool.sleeps):
        # Engines start meanwhile.
        precompile(session, placed, trainer)
    if pools:
        with session.starting("generator"):
            for engine_pool in pools:
                engine_pool.wait_until_built()
    emit("processes", **_process_ids(groups, pools))

    # The checkpoint is loaded before the first refit, so that engines get the weights that training continues from.
    source = RowSource(data.train, order_of(data.train, config))
    if session.checkpoint:
        group.call(TrainerWorker.load, str(session.checkpoint.trainer))
        source.cursor.load_state_dict(session.checkpoint.state["cursor"])
    return parts.make_loop(allocation, trainer, source, data), group, pool


def _process_ids(groups: "list[WorkerGroup]", pools: "Sequence[GeneratorPool]") -> dict[str, int]:
    """Return process name -> id, of all ranks and engines."""
    pids = {worker.name: worker.pid() for group in groups for worker in group.workers}
    for pool in pools:
        pids |= {engine.name: engine.pid() for engine in pool.engines}
    return pids


def _settle(settled: Settled, machine: RunMachine, files: ModelFiles, emit: Emit) -> Settled:
    """Return the run settled for its machine, and emit notes on its model. Raises ModelError if the engine cannot serve
    it.
    """
    placed = settled.settle_on(machine, files.facts.sizes)
    require_served(placed)
    for line in model_notes(files.facts.sizes, placed.device):
        emit("warning", what=line)
    if placed.device == "cuda" and placed.choices:
        emit("chosen", **{choice.key: choice.value for choice in placed.choices})
    return placed


def find_model(config: RunConfig, run_dir: RunDir, resumed: Checkpoint | None) -> ModelFiles:
    """Return the files of a run's model. resumed: checkpoint to continue from; it contains the trained weights.

    Raises ModelError if `model.path` is a checkpoint with damaged weights.
    """
    # Each restart searches for a replacement again: the run may have deleted the checkpoint that it used before.
    model = replace(config.model, path=stand_in(config.model.path, resumed) or config.model.path)
    # If model.path is the Hugging Face folder of a checkpoint, its parent is the checkpoint.
    checkpoint = Path(model.path).parent
    if not checkpoint.resolve().is_relative_to(run_dir.checkpoints.resolve()):
        # `hold` keeps another live run from pruning the checkpoint. This run's own checkpoints are pruned as usual.
        hold(checkpoint)
    files = ModelFiles.prepare(model, run_dir.path, config.run.seed, merge=config.lora is None)
    if resumed is None and (damage := damage_of_weights(Path(files.adapter or config.model.path))):
        raise ModelError(f"model.path: {damage}; name another checkpoint")
    return files


def _versions(loop: "Loop", pool: "GeneratorPool | None") -> str:
    return f"trainer at version {loop.done}" + (f", engines at version {pool.version}" if pool else "")


def announce(session: Session, placement: Placement) -> None:
    """Emit the run_started event."""
    config = session.config
    session.events.emit(
        "run_started",
        name=session.run_dir.name,
        algorithm=config.kind,
        model=config.model.path,
        num_steps=config.num_steps,
        start_step=session.start,
        attempt=session.run_dir.attempt,
        damaged=list(session.damaged.values()),
        **processes_of(placement),
        **identity(),
    )


def processes_of(placement: Placement) -> dict[str, Any]:
    """Return the fields of the `run_started` event that count ranks, engines, and the devices of both."""
    return {
        "device": placement.device,
        "devices": {"trainer": placement.trainer_devices, "generator": placement.generator_devices},
        "ranks": len(placement.trainers),
        "engines": len(placement.engines),
        "shared": placement.shared,
    }
