"""Components of a GRPO run, as assembly makes them and the loop uses them."""

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.data.cursor import TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.pool import GeneratorPool
from rlctl.rollout.scoring import GroupScorer
from rlctl.run.recorder import RunRecorder
from rlctl.telemetry.resource_monitor import ResourceMonitor
from rlctl.training.trainer_group import TrainerGroup


@dataclass(frozen=True)
class Devices:
    """Devices that train, that generate, and distinct ones in all: the denominators of the throughputs.

    name: of the trainer's device, for its peak; flops: of training, (sequence length) -> FLOPs a token.
    """

    trainer: int
    generator: int
    all: int
    name: str
    flops: Callable[[float], float]


@dataclass(frozen=True)
class GrpoComponents:
    """What a run is assembled from."""

    trainer: TrainerGroup
    pool: GeneratorPool
    source: TaskSource
    validation: list[Task]
    score: GroupScorer
    recorder: RunRecorder
    devices: Devices
    monitor: ResourceMonitor
