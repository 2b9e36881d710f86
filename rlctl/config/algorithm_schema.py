"""The sections of losses and advantages: one a name, which says what keys there are.

`configs/loss.yaml` and `configs/advantage.yaml` have the defaults by name. A section that names a class of the user's
own takes further keys: the fields of that class, see `plugin_options.py`.
"""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.fields import spec


@dataclass
class UserClassSection:
    """Keys of a user's class."""

    name: str = spec(
        "A class of one's own: module:Class or file.py:Class. The fields of the class are further keys.", path="plugin"
    )
    further: dict[str, Any] = spec("The fields of the class.")


@dataclass
class AdvantageSection:
    """Keys that every advantage has."""

    name: str = spec("The advantage.")


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
    name: Literal["batch_normalized"] = spec("Rewards normalised over all sampled tokens of the step (REINFORCE++).")
    baseline: Literal["none", "group_mean"] = spec(
        "What is subtracted from a reward before: nothing (REINFORCE++), or the mean of its group (REINFORCE++ with "
        "baseline)."
    )


@dataclass
class GdpoSection(AdvantageSection):
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


@dataclass
class UserAdvantageSection(UserClassSection, AdvantageSection):
    """An advantage of the user's own."""


AnyAdvantageSection = (
    GroupMeanSection
    | LeaveOneOutSection
    | BatchNormalizedSection
    | GdpoSection
    | QuantileSection
    | PassAtKSection
    | UserAdvantageSection
)


@dataclass
class LossSection:
    """Keys that every loss has."""

    name: str = spec("The loss.")
    proximal: Literal["auto", "rollout", "recompute"] = spec(
        "The old policy of the ratio. rollout uses the log-probs that the generator sampled with. recompute uses the "
        "trainer's log-probs before the update (the decoupled objective). auto is recompute in an asynchronous run, "
        "for gspo, and under generation.top_p or top_k, and else rollout."
    )
    force_on_policy_ratio: bool | None = spec(
        "Only with proximal recompute: take the policy that is being updated for the one before the update, which "
        "saves a pass over all tokens. null does so where a step makes one update, so that the two are the same."
    )
    importance_cap: float | None = spec(
        "Only with proximal recompute: weight each token by min(proximal / rollout, this value) (TIS). null weights "
        "the tokens that a mask keeps by proximal / rollout, and no token where there is no mask.",
        gt=0,
    )
    importance_mask: list[float] | None = spec(
        "Only with proximal recompute: leave out tokens whose proximal / rollout is outside [low, high] (IcePop). "
        "null leaves out none.",
        ge=0,
    )
    sequence_mask: list[float] | None = spec(
        "Only with proximal recompute: leave out rollouts whose geometric mean of proximal / rollout is outside "
        "[low, high]. null leaves out none.",
        ge=0,
    )
    age_decay: float = spec(
        "clip_low, clip_high and importance_cap - 1 are multiplied by this value once for each step of age.", gt=0, le=1
    )
    kl_coef: float = spec("The weight of the KL divergence to the reference. At 0 no reference is loaded.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = spec("The estimator of the KL divergence.")
    kl_max: float | None = spec(
        "The most that a token's KL term and its importance weight may be, without a gradient beyond. null bounds "
        "neither.",
        gt=0,
    )
    entropy_coef: float = spec("The weight of the entropy bonus.", ge=0)


@dataclass
class ClippedLossSection(LossSection):
    """Keys of the losses with a clipped surrogate."""

    clip_low: float = spec("The ratio is clipped below at 1 - clip_low.", ge=0, lt=1)
    clip_high: float = spec("The ratio is clipped above at 1 + clip_high.", ge=0)
    dual_clip: float | None = spec(
        "Where the advantage A is negative, the loss is at most -A times this value. null turns it off.", gt=1
    )


@dataclass
class GrpoLossSection(ClippedLossSection):
    name: Literal["grpo"] = spec("The clipped surrogate of PPO, token by token.")
    reduction: Literal["token", "sequence"] = spec(
        "The loss is the mean over all tokens of the update, or over its rollouts of each one's mean."
    )


@dataclass
class DrGrpoLossSection(ClippedLossSection):
    name: Literal["dr_grpo"] = spec("The clipped surrogate, divided by a constant length.")
    max_tokens: int | None = spec("The constant length, in tokens. null is generation.max_new_tokens.", ge=1)


@dataclass
class GspoLossSection(ClippedLossSection):
    name: Literal["gspo"] = spec("The clipped surrogate of a rollout's whole ratio, the mean over rollouts.")
    level: Literal["sequence", "token"] = spec(
        "Clip a rollout as a whole (sequence, GSPO), or give each token its own advantage and gradient (token, "
        "GSPO-token)."
    )


@dataclass
class CispoLossSection(LossSection):
    name: Literal["cispo"] = spec(
        "The policy gradient with a clipped importance weight. Its proximal is rollout unless it is set."
    )
    clip_low: float = spec("A token's weight is at least 1 - clip_low. 1 is no bound.", ge=0, le=1)
    clip_high: float = spec("A token's weight is at most 1 + clip_high.", ge=0)


@dataclass
class ReinforceLossSection(ClippedLossSection):
    name: Literal["reinforce"] = spec("REINFORCE++: the clipped surrogate, for advantages normalised over the batch.")


@dataclass
class DppoLossSection(LossSection):
    name: Literal["dppo"] = spec(
        "The policy gradient within a trust region of probabilities around the policy that sampled: its proximal is "
        "rollout."
    )
    proximal: Literal["rollout"] = spec("The trust region is around the policy that sampled.")
    mask_low: float = spec(
        "A token of negative advantage is left out where its probability has fallen by more than this.", ge=0
    )
    mask_high: float = spec(
        "A token of positive advantage is left out where its probability has risen by more than this.", ge=0
    )
    ratio_cap: float = spec("A token's importance weight is at most this.", ge=1)
    rollout_kl_coef: float = spec("The weight of the squared log-ratio to the policy that sampled.", ge=0)


@dataclass
class UserLossSection(UserClassSection, LossSection):
    """A loss of the user's own."""


AnyLossSection = (
    GrpoLossSection
    | DrGrpoLossSection
    | GspoLossSection
    | CispoLossSection
    | ReinforceLossSection
    | DppoLossSection
    | UserLossSection
)
