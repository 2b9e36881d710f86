"""Assembly of the parts that only an SFT run has: samples, Ray Compiled Graph with its warm-up, sampled validation."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from rlctl.config.schema import CompiledGraphSection
from rlctl.data.chat import Chat
from rlctl.data.cursor import SampleSource
from rlctl.data.load_data import RunRows
from rlctl.data.mixture import step_lengths
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.launch.loading import RunData, load_run_samples
from rlctl.launch.precompile import precompile, precompiles
from rlctl.launch.runtime import Allocation
from rlctl.launch.sampling import SamplingParts, held_out_tasks
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.backend import layout_of
from rlctl.preflight.settled import SettledSft
from rlctl.run.fingerprint import digest_rows
from rlctl.utils.devices import usable_cores

if TYPE_CHECKING:
    from rlctl.grpo.validation import SampledValidation
    from rlctl.sft.loop import SftLoop
    from rlctl.training.trainer_group import TrainerGroup
    from rlctl.workers.group import WorkerGroup

# Initial bytes of a channel of the compiled graph. A batch of the tiny run fits; the warm-up grows the channel for a
# larger batch.
_BUFFER_BYTES = 1 << 20
# Number of empty calls that `_milliseconds` times.
_TIMED_CALLS = 20


@dataclass
class SftParts:
    """`AlgorithmParts` of an SFT run."""

    session: Session
    settled: SettledSft
    files: ModelFiles
    # Engines, rewards and so on of the recipe that validates the run; None without a recipe.
    sampling: SamplingParts | None
    # The recipe's held-out tasks.
    tasks: list[Task] = field(default_factory=list)

    def load(self, chat: Chat, rows: RunRows) -> RunData[SupervisedSample]:
        """Tokenize the samples, report how full their packs are, and load the recipe's validation tasks."""
        from rlctl.training.micro_batching import packing

        session = self.session
        settled = self.settled
        with session.starting("data"):
            data = load_run_samples(settled, rows, chat, session.events.emit)
            trainer = settled.trainer
            lengths = step_lengths(data.train, settled.config)
            packs = packing(lengths, layout_of(trainer).data, trainer.micro_batch_tokens, trainer.is_padded)
            session.events.emit("data", what=f"packing: {packs}")
        session.depend_on_rows(digest_rows(data.train))
        if sampling := self.sampling:
            self.tasks = held_out_tasks(sampling.settled, sampling.chat, session.events.emit)
            session.events.emit("data", what=f"validation.recipe: {len(self.tasks)} prompts")
            sampling.try_on(self.tasks[0])
        return data

    def start_models(self, allocation: Allocation) -> "list[WorkerGroup]":
        """Start nothing: SFT has the one model."""
        return []

    def make_loop(
        self,
        allocation: Allocation,
        trainer: "TrainerGroup",
        source: SampleSource,
        data: RunData[SupervisedSample],
    ) -> "SftLoop":
        """Connect the recipe's engines. Compile the calls to the ranks with Ray Compiled Graph if it is enabled."""
        from rlctl.launch.worker_specs import training_cost
        from rlctl.sft.loop import SftComponents, SftLoop

        session = self.session
        config = self.settled.config
        with ExitStack() as stack:
            sampled = None
            if self.sampling:
                sampled = self._prepare_validation(self.sampling, stack, allocation, trainer)
            if config.ray_compiled_graph.enabled:
                self._compile(trainer, max(len(sample.tokens) for sample in data.train + data.validation))
            device_name, flops = training_cost(self.files, trainer.info())
            components = SftComponents(
                trainer=trainer,
                source=source,
                validation=data.validation,
                answers=sampled,
                recorder=session.recorder,
                devices=allocation.placement.trainer_devices,
                device=device_name,
                flops=flops,
            )
            # From here on the loop owns the sampling parts, and closes them.
            stack.pop_all()
        return SftLoop(config, components, session.stops)

    def _prepare_validation(
        self, sampling: SamplingParts, stack: ExitStack, allocation: Allocation, trainer: "TrainerGroup"
    ) -> "SampledValidation":
        """Send the engines the trainer's weights, and let them sleep if they share its devices."""
        from rlctl.grpo.validation import SampledValidation, Validation

        session = self.session
        sampling.connect(allocation, trainer)
        sampling.pool.sync(session.start)
        if sampling.pool.sleeps:
            sampling.pool.rest()
            if precompiles(self.settled):
                precompile(session, self.settled, trainer)
        dispatcher, runner = sampling.open(stack)
        validation = Validation(sampling.config, dispatcher, runner, sampling.score, self.tasks)
        return SampledValidation(validation, sampling.pool, session.recorder, sampling.decode)

    def _compile(self, trainer: "TrainerGroup", longest: int) -> None:
        from rlctl.sft.loss import make_loss

        config = self.settled.config
        graph = config.ray_compiled_graph
        loss = make_loss(config.sft.loss)
        compile_group(graph, trainer.group, self.session)
        with self.session.starting("warm-up"), ordinary_if_it_fails(graph, trainer.group, self.session):
            for count, length in warm_up_passes(self.settled, longest):
                trainer.warm_up(count, length, loss)


def warm_up_passes(settled: SettledSft, longest: int) -> list[tuple[int, int]]:
    """Return (number of sequences, tokens of each sequence) for each warm-up pass of a compiled graph.

    longest: tokens of the longest sample.
    """
    config = settled.config
    graph = config.ray_compiled_graph
    lengths = [graph.warmup_seq_len or longest]
    if settled.trainer.compile:
        # torch.compile treats dimensions of equal size as one. A second length keeps them apart.
        lengths.append(max(2, lengths[0] // 2 - 1))
    return [(graph.warmup_gbs or config.sft.batch_size, length) for length in lengths]


def compile_group(graph: CompiledGraphSection, group: "WorkerGroup", session: Session) -> None:
    """Send the calls to all ranks through a compiled graph from now on.

    If the graph cannot be built, `enabled: true` emits a warning, and `enabled: require` raises GraphUnavailable.
    """
    from rlctl.workers.compiled_graph import GraphUnavailable

    emit = session.events.emit
    cores = usable_cores()
    if len(group) + 1 > cores:
        text = f"{len(group)} ranks and the driver share {cores} cores: calls are not much faster than ordinary ones"
        emit("warning", what=f"ray_compiled_graph: {text}")

    def report_break(reason: str) -> None:
        if graph.enabled == "require":
            raise GraphUnavailable(f"the compiled graph broke: {reason}")
        emit("warning", what=f"the compiled graph broke, the run goes on with ordinary calls: {reason}")

    ordinary = _milliseconds(group)
    try:
        with session.starting("compiled graph"):
            group.compile(_BUFFER_BYTES, report_break)
    except GraphUnavailable as error:
        if graph.enabled == "require":
            raise
        emit("warning", what=f"no compiled graph, ordinary calls do the same: {error}")
        return
    compiled = _milliseconds(group)
    emit("dispatch", what=f"compiled {compiled:.1f} ms a call, ordinary {ordinary:.1f} ms")


@contextmanager
def ordinary_if_it_fails(graph: CompiledGraphSection, group: "WorkerGroup", session: Session) -> Iterator[None]:
    """If a call in the block raises or breaks the graph, emit a warning and go back to ordinary Ray calls.

    The block must not change weights. With `enabled: require` the error is raised as GraphUnavailable. The error of a
    worker that died or hangs is always raised.
    """
    from rlctl.workers.compiled_graph import GraphBroken, GraphUnavailable
    from rlctl.workers.errors import WorkerError

    try:
        yield
    except (WorkerError, GraphBroken) as error:
        if graph.enabled == "require":
            raise GraphUnavailable(f"the compiled graph's warm-up failed: {error}") from error
        group.uncompile()
        text = f"the compiled graph's warm-up failed, the run goes on with ordinary calls: {error}"
        session.events.emit("warning", what=text)


def _milliseconds(group: "WorkerGroup") -> float:
    """Return the median duration of an empty call to all ranks, in milliseconds."""
    from rlctl.workers.compiled_graph import idle

    seconds = []
    for _ in range(_TIMED_CALLS):
        start = time.perf_counter()
        group.call(idle)
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)
