"""Components of a GRPO run, as assembly makes them and the loop uses them."""

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.data.cursor import TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.scoring import GroupScorer
from rlctl.rollout.types import Decode
from rlctl.run.recorder import RunRecorder
from rlctl.telemetry.resource_monitor import ResourceMonitor
from rlctl.telemetry.throughput import TrainingFlops
from rlctl.training.trainer_group import TrainerGroup


@dataclass(frozen=True)
class Devices:
    """Numbers of devices, the denominators of the throughputs."""

    trainer: int
    generator: int
    # Distinct devices of the run.
    all: int
    # The trainer's kind of device, which tells its peak.
    name: str
    # FLOPs of training a token.
    flops: TrainingFlops


@dataclass(frozen=True)
class GrpoComponents:
    """Parts of a run."""

    trainer: TrainerGroup
    pool: GeneratorPool
    dispatcher: RolloutDispatcher
    runner: RolloutRunner
    source: TaskSource
    validation: list[Task]
    score: GroupScorer
    recorder: RunRecorder
    devices: Devices
    monitor: ResourceMonitor
    # Text of tokens with the special ones, for records.
    decode: Decode
    # Most common cause of failed rewards or episodes; empty where none failed.
    failure_cause: Callable[[], str]
    # The same of tools, whose errors the model reads.
    tool_cause: Callable[[], str]
