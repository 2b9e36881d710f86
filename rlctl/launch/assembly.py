"""The assembly of a run, the same for every algorithm: the parts, their order, their waits and their ends.

Read `assemble` from top to bottom. It ends its parts, the last first, at any end of the run. An algorithm adds its own
parts, see `AlgorithmParts`.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.config.errors import ModelError
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import RowSource
from rlctl.data.ends import EndTokens
from rlctl.data.load import RowReader, RunRows
from rlctl.data.mixture import order_of
from rlctl.launch.assemble_grpo import GrpoParts
from rlctl.launch.assemble_sft import SftParts
from rlctl.launch.loading import DataLoading, RunData
from rlctl.launch.precompile import precompile, precompiles
from rlctl.launch.runtime import Allocation, Runtime
from rlctl.launch.sampling import SamplingParts
from rlctl.launch.session import Session, run_session
from rlctl.models.model_files import ModelFiles
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.placement import Placement, resources
from rlctl.preflight.plan import require_served
from rlctl.preflight.resolved import Resolved
from rlctl.preflight.tuning import Tuned, tune
from rlctl.run.checkpoints import Checkpoints, damage_of_weights
from rlctl.run.fingerprint import made_with
from rlctl.utils.process import identity

if TYPE_CHECKING:
    from rlctl.generation.pool import GeneratorPool
    from rlctl.run.loop import Loop
    from rlctl.training.trainer_group import TrainerGroup


class AlgorithmParts(Protocol):
    """The parts of a run that only its algorithm has. `assemble` calls each method once, in this order."""

    # Optimizer updates of the whole run.
    updates: int
    # Sampling temperature, by which the trainer divides its logits.
    temperature: float

    def settle(self, tuned: Tuned) -> None:
        """Use a config in which the keys at `auto` have values, from now on."""

    def load_chat(self) -> tuple[Chat, EndTokens]:
        """Load the tokenizer, and find the tokens that end an answer, on the thread of `load`. Raises DataError."""

    def load(self, chat: Chat, rows: RunRows) -> RunData[Any]:
        """Tokenize the rows and check them, on a separate thread. Raises DataError or RewardError."""

    def start_engines(self, allocation: Allocation, loading: DataLoading[Any]) -> "GeneratorPool | None":
        """Start the engines without waiting. Returns None for an algorithm that does not sample."""

    def make_loop(
        self, allocation: Allocation, trainer: "TrainerGroup", source: RowSource[Any], data: RunData[Any]
    ) -> "Loop | None":
        """Connect the started parts and check them. Returns the loop, or None if only the check was wanted."""


def launch(
    config: RunConfig,
    resolved: str,
    runtime: Runtime,
    resume: Path | None = None,
    probe_only: bool = False,
    reader: RowReader | None = None,
) -> int:
    """Run `config` to its end and return the exit code. `rlctl train` and the job on a cluster both enter here.

    resolved: the config as YAML. resume: the directory of the run to continue. probe_only: compare trainer and
    generator, then stop. reader: holds the rows if they were read already.
    """
    body = partial(assemble, runtime, reader or RowReader(config), probe_only)
    return run_session(config, resolved, resume, body, runtime.refuse)


def assemble(runtime: Runtime, reader: RowReader, probe_only: bool, session: Session) -> None:
    """Start the parts of a run, train until its last step, and end the parts."""
    config, deadline_s = session.config, session.config.run.deadline_s
    files = _find_model(session)
    session.depend_on(made_with(config, Path(files.source)))
    with ExitStack() as stack:
        parts: AlgorithmParts
        sampling = Resolved(config).sampling
        sampled = SamplingParts.make(stack, session, sampling, files) if sampling else None
        if isinstance(config, GrpoConfig):
            assert sampled
            parts = GrpoParts(session, config, files, sampled, probe_only)
        else:
            parts = SftParts(session, config, files, sampled)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        begun: list[tuple[DataLoading[Any], RunConfig]] = []

        def begin(placement: Placement, memory: int | None) -> None:
            announce(session, placement)
            sizes = read_sizes(Path(files.folder) / "config.json")
            require_served(config, placement.device, sizes)
            tuned = tune(config, placement.device, sizes, memory)
            parts.settle(tuned)
            if placement.device == "cuda" and tuned.choices:
                session.events.emit("chosen", **{choice.key: choice.value for choice in tuned.choices})
            chat = threads.submit(parts.load_chat)
            data = threads.submit(lambda: parts.load(chat.result()[0], reader.take()))
            begun.append((DataLoading(chat, data), tuned.config))

        # Ray starts once the devices are chosen. The rows are tokenized meanwhile.
        allocation = stack.enter_context(runtime.allocation(session, resources(config), begin))
        ((loading, config),) = begun
        if loading.data.done():
            # An error in data or rewards is usually known by now.
            loading.data.result()

        # Trainer ranks and engines start side by side. The slow imports come here, after the run has been announced.
        from rlctl.launch.worker_specs import trainer_specs
        from rlctl.training.trainer_group import TrainerGroup
        from rlctl.training.worker import TrainerWorker
        from rlctl.workers.group import WorkerGroup

        specs = trainer_specs(session, config, files, allocation, parts.updates, parts.temperature)
        group = WorkerGroup(specs, deadline_s)
        stack.callback(group.kill)
        pool = parts.start_engines(allocation, loading)
        if pool:
            stack.callback(pool.kill)
        data = loading.data.result()
        session.recorder.export_dtype = Resolved(config, allocation.placement.device).export_dtype
        session.recorder.end_tokens = loading.chat.result()[1].stops
        with session.starting("trainer"):
            group.built().wait(deadline_s)
        trainer = TrainerGroup(group, config.trainer)
        if precompiles(config) and not (pool and pool.sleeps):
            # Engines start meanwhile.
            precompile(session, config, trainer)
        if pool:
            with session.starting("generator"):
                pool.wait_until_built()
        workers = [*group.workers, *(pool.engines if pool else ())]
        session.events.emit("processes", **{worker.name: worker.pid() for worker in workers})

        # The checkpoint comes first: engines get the weights that training continues from.
        source = RowSource(data.train, order_of(data.train, config))
        if session.checkpoint:
            group.call(TrainerWorker.load, str(session.checkpoint.trainer))
            source.cursor.load_state_dict(session.checkpoint.state["cursor"])
        loop = parts.make_loop(allocation, trainer, source, data)
        if loop:
            session.waits.where = partial(_versions, loop, pool)
            with closing(loop):
                if session.checkpoint:
                    loop.resume(session.checkpoint)
                session.go_on()
                session.started()
                loop.run(session.start)
        if pool:
            # Ranks free the refit's memory. After a failure they may not answer, and are only killed.
            group.call(TrainerWorker.close)


def _find_model(session: Session) -> ModelFiles:
    """Return the files of the run's model. Raises ModelError for a checkpoint's weights that are damaged."""
    files = ModelFiles.find(session.config.model, session.run_dir.path, session.config.run.seed)
    # A resumed run brings its weights.
    resumed = Checkpoints(session.run_dir.checkpoints, 1, 0).latest()
    if resumed is None and (damage := damage_of_weights(Path(files.source))):
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
        num_steps=Resolved(config).num_steps,
        start_step=session.start,
        attempt=session.run_dir.attempt,
        damaged=list(session.damaged.values()),
        **processes_of(placement),
        **identity(),
    )


def processes_of(placement: Placement) -> dict[str, Any]:
    """Return the fields of run_started that count ranks, engines, and the devices of each side."""
    return {
        "device": placement.device,
        "devices": {"trainer": placement.trainer_devices, "generator": placement.generator_devices},
        "ranks": len(placement.trainers),
        "engines": len(placement.engines),
        "shared": placement.shared,
    }
