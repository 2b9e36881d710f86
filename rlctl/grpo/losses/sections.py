"""The section of each loss: its keys, their meanings and limits. No torch, as in every check of a config.

`configs/loss.yaml` has the defaults.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.config.fields import spec
from rlctl.config.grpo_schema import LossSection, UserLossSection


@dataclass
class ClippedLossSection(LossSection):
    """Keys of the losses with a clipped surrogate."""

    clips: ClassVar[bool] = True

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

    @property
    def whole_rollouts(self) -> bool:
        return self.reduction == "sequence" or super().whole_rollouts


@dataclass
class DrGrpoLossSection(ClippedLossSection):
    name: Literal["dr_grpo"] = spec("The clipped surrogate, divided by a constant length.")
    max_tokens: int | None = spec("The constant length, in tokens. null is generation.max_new_tokens.", ge=1)


@dataclass
class GspoLossSection(ClippedLossSection):
    # Bounds of 3e-4 and 4e-4 are narrower than the gap between engine and trainer in bfloat16. Against the engine's
    # log-probs they held 37% of the tokens of `gspo-tiny` before the policy had moved.
    recomputes: ClassVar[bool] = True
    name: Literal["gspo"] = spec("The clipped surrogate of a rollout's whole ratio, the mean over rollouts.")
    level: Literal["sequence", "token"] = spec(
        "Clip a rollout as a whole (sequence, GSPO), or give each token its own advantage and gradient (token, "
        "GSPO-token)."
    )

    @property
    def whole_rollouts(self) -> bool:
        return True


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


AnyLossSection = (
    GrpoLossSection
    | DrGrpoLossSection
    | GspoLossSection
    | CispoLossSection
    | ReinforceLossSection
    | DppoLossSection
    | UserLossSection
)
