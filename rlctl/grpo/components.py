"""Components of a GRPO run: assembly makes them, and the loop uses them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.data.cursor import TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.grpo.critic import Critic
from rlctl.preflight.declared_columns import Role
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.engine_judge import EngineJudge
from rlctl.rollout.frozen_scores import FrozenScores
from rlctl.rollout.model_rewards import ModelRewards
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
    # Number of distinct devices of the run.
    all: int
    # Name of the trainer's kind of device, from which its peak FLOPs follow.
    name: str
    # FLOPs of training one token.
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
    # None for a run without critic.
    critic: Critic | None
    # Models on engines that score, by role.
    frozen: Mapping[Role, FrozenScores]
    # Judges that engines of the run serve.
    judges: Sequence[EngineJudge]
    # Reward models; None without any.
    model_rewards: ModelRewards | None
    # Decodes tokens to text, including special tokens, for records.
    decode: Decode
    # Returns metrics of the rewards' programs since the last call; empty if no reward runs programs.
    program_metrics: Callable[[], dict[str, float]]
    # Returns the most common cause of failed rewards or episodes; empty if none failed.
    failure_cause: Callable[[], str]
    # Returns the most common cause of failed tools; empty if none failed.
    tool_cause: Callable[[], str]
