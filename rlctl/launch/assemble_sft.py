"""The parts of a run that only SFT has: samples, and a compiled graph with its warm-up."""

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlctl.config.schema import SftConfig
from rlctl.data.cursor import SampleSource
from rlctl.data.load import RunRows
from rlctl.data.tasks import SupervisedSample
from rlctl.launch.loading import DataLoading, RunData, load_run_samples
from rlctl.launch.runtime import Allocation
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles

if TYPE_CHECKING:
    from rlctl.sft.loop import SftLoop
    from rlctl.training.trainer_group import TrainerGroup


@dataclass
class SftParts:
    """The parts of an SFT run, see `AlgorithmParts`."""

    session: Session
    config: SftConfig
    files: ModelFiles

    def __post_init__(self) -> None:
        self.updates, self.temperature = self.config.sft.num_steps, 1.0

    def load(self, threads: Executor, rows: RunRows) -> DataLoading[SupervisedSample]:
        """Tokenize the samples, and tell how they pack."""
        load = partial(load_run_samples, self.session, self.config, self.files, rows)
        return DataLoading.begin(threads, self.session, self.files, load)

    def start_engines(self, allocation: Allocation, loading: DataLoading[SupervisedSample]) -> None:
        """Start nothing: SFT does not sample."""

    def make_loop(
        self,
        allocation: Allocation,
        trainer: "TrainerGroup",
        source: SampleSource,
        data: RunData[SupervisedSample],
    ) -> "SftLoop":
        """Put the ranks behind a compiled graph if that is asked, and warm them up."""
        from rlctl.launch.worker_specs import training_cost
        from rlctl.sft.loop import SftComponents, SftLoop

        session, config = self.session, self.config
        if config.ray_compiled_graph.enabled:
            self._compile(trainer, max(len(sample.tokens) for sample in [*data.train, *data.validation]))
        devices, cost = allocation.placement.trainer_devices, training_cost(self.files, trainer.info())
        components = SftComponents(trainer, source, data.validation, session.recorder, devices, *cost)
        return SftLoop(config, components, session.stops)

    def _compile(self, trainer: "TrainerGroup", longest: int) -> None:
        from rlctl.launch.compiled_graph import compile_group
        from rlctl.sft.loss import NllLoss

        graph, config = self.config.ray_compiled_graph, self.config
        compile_group(graph, trainer.group, self.session)
        with self.session.starting("warm-up"):
            length = graph.warmup_seq_len or longest
            # Sizes that happen to be equal are compiled as one: a second length keeps them apart.
            lengths = (length, max(2, length // 2 - 1)) if config.trainer.compile else (length,)
            for each in lengths:
                trainer.warm_up(graph.warmup_gbs or config.sft.batch_size, each, NllLoss())
