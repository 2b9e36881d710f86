"""Brings an SFT run to life: data, Ray and trainer ranks come up together, then the loop."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from rlctl.config.schema import RunConfig, SftConfig
from rlctl.data.load import RowReader
from rlctl.launch.assemble_grpo import announce, training_cost
from rlctl.launch.loading import Samples, load_run_samples
from rlctl.launch.runtime import Allocation, Runtime
from rlctl.launch.session import Session, run_session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.placement import Placement, resources
from rlctl.run.fingerprint import made_with


def run_sft(
    config: RunConfig, resolved: str, runtime: Runtime, resume: Path | None = None, reader: RowReader | None = None
) -> int:
    """`rlctl train sft`: returns the exit code. reader: holds the rows if they were read already."""
    reader = reader or RowReader(config)
    return run_session(config, resolved, resume, lambda session: _sft(session, runtime, reader), runtime.refuse)


def _sft(session: Session, runtime: Runtime, reader: RowReader) -> None:
    config = session.config
    assert isinstance(config, SftConfig)
    files = ModelFiles.find(config.model, session.run_dir.path, config.run.seed)
    session.depend_on(made_with(config, Path(files.source)))
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        loading: list[Future[Samples]] = []

        def begin(placement: Placement) -> None:
            announce(session, config, config.sft.num_steps, placement)
            loading.append(threads.submit(load_run_samples, session, config, files, reader.take()))

        allocation = stack.enter_context(runtime.allocation(session, resources(config), begin))
        _assembled(stack, session, config, files, allocation, loading[0])


def _assembled(
    stack: ExitStack,
    session: Session,
    config: SftConfig,
    files: ModelFiles,
    allocation: Allocation,
    loading: "Future[Samples]",
) -> None:
    from rlctl.data.cursor import Cursor, SampleSource
    from rlctl.launch.compiled_graph import compile_group
    from rlctl.launch.worker_specs import start_trainers
    from rlctl.sft.loop import SftComponents, SftLoop
    from rlctl.sft.loss import NllLoss
    from rlctl.training.trainer_group import TrainerGroup

    group = start_trainers(session, config, files, allocation, config.sft.num_steps, temperature=1.0)
    stack.callback(group.kill)
    samples = loading.result()
    train, validation = samples.train, samples.validation
    with session.starting("trainer"):
        group.built().wait(config.run.deadline_s)
    session.events.emit("processes", **{worker.name: worker.pid() for worker in group.workers})
    source = SampleSource(train, Cursor(len(train), config.run.seed, config.data.shuffle))
    if session.checkpoint:
        group.call("load", str(session.checkpoint.trainer))
        source.cursor.load_state_dict(session.checkpoint.state["cursor"])
    trainer = TrainerGroup(group, config.trainer)
    graph = config.ray_compiled_graph
    if graph.enabled:
        compile_group(graph, group, session)
        with session.starting("warm-up"):
            length = graph.warmup_seq_len or max(len(sample.tokens) for sample in [*train, *validation])
            # Sizes that happen to be equal are compiled as one: a second length keeps them apart.
            lengths = (length, max(2, length // 2 - 1)) if config.trainer.compile else (length,)
            for each in lengths:
                trainer.warm_up(graph.warmup_gbs or config.sft.batch_size, each, NllLoss())
    cost = training_cost(trainer.info(), files)
    parts = SftComponents(trainer, source, validation, session.recorder, allocation.placement.trainer_devices, *cost)
    loop = SftLoop(config, parts, session.stops)
    session.waits.where = lambda: f"trainer at version {loop.done}"
    if session.checkpoint:
        loop.resume(session.checkpoint)
    session.go_on()
    loop.run(session.start)
