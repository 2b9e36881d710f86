"""The loss of Dr. GRPO: the clipped surrogate, divided by a constant length."""

from dataclasses import dataclass
from typing import Any, Self

from rlctl.grpo.losses.base import Mean
from rlctl.grpo.losses.grpo import ClippedLoss
from rlctl.grpo.losses.sections import DrGrpoLossSection
from rlctl.preflight.settled import SettledGrpo


@dataclass(frozen=True, kw_only=True)
class DrGrpoLoss(ClippedLoss):
    """`ClippedLoss`, summed over the update's tokens and divided by (number of rollouts) x max_tokens.

    Dr. GRPO, arXiv 2503.20783, section 3.2: if each rollout were averaged over its tokens, a long wrong answer would
    cost less than a short one. The metrics loss/* are means over tokens.
    """

    # Constant length, by which the sum of every rollout is divided.
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
