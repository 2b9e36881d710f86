"""Schema of the critic: the model that values the states of rollouts for `grpo.advantage.name=gae`."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass

from rlctl.config.fields import MOST_PROCESSES, spec
from rlctl.config.trainer_schema import OptimizerSection


@dataclass(frozen=True)
class CriticSection:
    path: str | None = spec(
        "The model with whose weights the critic begins: a Hugging Face folder or hub name of a causal LM, which gets "
        "a new head, or of a reward model, which keeps its head. null is the policy's first weights.",
        path="model",
    )
    num_ranks: int | None = spec(
        "The processes of the critic. Each shares a device with a rank of the trainer, and both take turns. null is "
        "trainer.num_ranks.",
        ge=1,
        most=MOST_PROCESSES,
    )
    warm_up_steps: int = spec("The first steps of the run, in which the critic learns and the policy does not.", ge=0)
    updates_per_step: int = spec("The optimizer updates of the critic in a step, each of some of its groups.", ge=1)
    value_clip: float | None = spec(
        "A value counts as at most this far from that before the step's first update, as in PPO. null is no bound.",
        gt=0,
    )
    optimizer: OptimizerSection = spec("The critic's optimizer and the schedule of its learning rate.")
