"""The loss of Dr. GRPO: the clipped surrogate, divided by a constant length."""

from dataclasses import dataclass
from typing import Any, Self

from rlctl.grpo.losses.base import Mean
from rlctl.grpo.losses.grpo import ClippedLoss
from rlctl.grpo.losses.sections import DrGrpoLossSection
from rlctl.preflight.settled import SettledGrpo


@dataclass(frozen=True, kw_only=True)
class DrGrpoLoss(ClippedLoss):
    """`ClippedLoss` summed over the update's tokens, over the number of rollouts times max_tokens.

    Dr. GRPO, arXiv 2503.20783, section 3.2: each rollout's mean over its own tokens would make a wrong answer cost less
    the longer it is. The metrics loss/* are means over tokens.
    """

    # L, the same for every rollout.
    max_tokens: int

    @classmethod
    def from_settled(cls, settled: SettledGrpo, **derived: Any) -> Self:
        section = settled.config.grpo.loss
        assert isinstance(section, DrGrpoLossSection)
        tokens = section.max_tokens or settled.config.generation.max_new_tokens
        return super().from_settled(settled, **{"max_tokens": tokens, **derived})

    @property
    def mean_over(self) -> Mean:
        return float(self.max_tokens)
