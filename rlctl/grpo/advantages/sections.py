"""Config section of each advantage: its keys with meanings and limits. `configs/advantage.yaml` has the defaults.

This module imports no torch, so that checks of a config stay fast.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.config.fields import spec
from rlctl.config.grpo_schema import AdvantageScope, AdvantageSection, UserAdvantageSection


@dataclass
class GroupMeanSection(AdvantageSection):
    name: Literal["group_mean"] = spec("A rollout's reward minus the mean of its group.")
    normalize_std: bool = spec("Divide advantages by the standard deviation of the group's rewards.")


@dataclass
class LeaveOneOutSection(AdvantageSection):
    name: Literal["leave_one_out"] = spec("A rollout's reward minus the mean of the others in its group (RLOO).")
    normalize_std: bool = spec("Divide advantages by the standard deviation of the group's rewards.")


@dataclass
class BatchNormalizedSection(AdvantageSection):
    scope: ClassVar[AdvantageScope] = "batch"
    name: Literal["batch_normalized"] = spec("Rewards normalised over all sampled tokens of the step (REINFORCE++).")
    baseline: Literal["none", "group_mean"] = spec(
        "What is subtracted from a reward before: nothing (REINFORCE++), or the mean of its group (REINFORCE++ with "
        "baseline)."
    )


@dataclass
class GdpoSection(AdvantageSection):
    scope: ClassVar[AdvantageScope] = "batch"
    name: Literal["gdpo"] = spec(
        "Each reward normalised within its group, their weighted sum over all rollouts of the step (GDPO)."
    )


@dataclass
class QuantileSection(AdvantageSection):
    name: Literal["quantile"] = spec("A rollout's reward minus a quantile of its group (QAE).")
    quantile: float = spec(
        "A group of which a share of more than 1 - quantile is right learns from its wrong rollouts, any other from "
        "its right ones.",
        gt=0,
        lt=1,
    )


@dataclass
class PassAtKSection(AdvantageSection):
    name: Literal["pass_at_k"] = spec("The chance that one of k rollouts is right, as the reward (pass@k training).")
    k: int = spec("The rollouts of a subset, fewer than num_generations_per_prompt. 1 is group_mean.", ge=1)

    def teaches_nothing(self, size: int) -> tuple[str, str] | None:
        if self.k < size:
            return None
        return "k", f"must be below grpo.num_generations_per_prompt={size}, not {self.k}: every advantage would be 0"


@dataclass
class GaeSection(AdvantageSection):
    scope: ClassVar[AdvantageScope] = "batch"
    name: Literal["gae"] = spec("Generalised advantage estimation, from the values of a critic (PPO).")
    gamma: float = spec("The discount of a token's reward and value at the token before.", gt=0, le=1)
    lam: float = spec(
        "The weight of later tokens: 0 is the reward and the next value against the value, 1 is all that comes.",
        ge=0,
        le=1,
    )
    whiten: bool = spec("Give the advantages of the step's tokens mean 0 and variance 1.")
    bootstrap_cut: bool = spec(
        "Where a rollout was cut at a limit of its length, count the critic's value of its end as what would have "
        "come. If false, that is 0, as after a rollout that ended."
    )
    kl_coef: float = spec("The weight of the KL to the reference in each token's reward. 0 has none.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = spec(
        "Only with kl_coef: the estimate at a token, with x = log(reference / policy): k1 is -x, k2 is x^2 / 2, k3 is "
        "exp(x) - 1 - x."
    )

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns that the advantage reads."""
        return ("value", "rollout_log_prob", "reference_log_prob") if self.kl_coef else ("value",)


AnyAdvantageSection = (
    GroupMeanSection
    | LeaveOneOutSection
    | BatchNormalizedSection
    | GdpoSection
    | QuantileSection
    | PassAtKSection
    | GaeSection
    | UserAdvantageSection
)
