"""The loss of GRPO: the clipped surrogate of PPO, token by token."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlctl.grpo.losses.base import Mean, PolicyLoss, PolicyTerm, PolicyTokens
from rlctl.grpo.losses.terms import bound_by, clip_ratio


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 the result is at most -dual_clip A.

    PPO, arXiv 1707.06347, equation 7. Two different bounds: DAPO, arXiv 2503.14476, section 3.1. dual_clip: arXiv
    1912.09729. The gradient is -r A grad log pi, and 0 where the ratio is clipped.
    """

    clips: ClassVar[bool] = True

    clip_low: float
    clip_high: float
    dual_clip: float | None

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return self.surrogate(tokens, tokens.ratio)

    def surrogate(self, tokens: PolicyTokens, ratio: Tensor) -> PolicyTerm:
        """Return the clipped surrogate of each token, [T], for a ratio [T]."""
        low = 1 - self.clip_low * tokens.shrink
        high = 1 + self.clip_high * tokens.shrink
        bounded = clip_ratio(ratio, tokens.advantage, low, high, self.dual_clip)
        clipped_low, clipped_high = bound_by(ratio, bounded, tokens.advantage)
        return PolicyTerm(-tokens.advantage * bounded, low=clipped_low, high=clipped_high, ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class GrpoLoss(ClippedLoss):
    """`ClippedLoss`, averaged over tokens or over rollouts.

    reduction token: mean over the update's tokens (DAPO, arXiv 2503.14476, equation 8). sequence: mean over each
    rollout's tokens, then over rollouts (GRPO, arXiv 2402.03300, equation 3).
    """

    reduction: Literal["token", "sequence"]

    @property
    def mean_over(self) -> Mean:
        return "rollouts" if self.reduction == "sequence" else "tokens"
