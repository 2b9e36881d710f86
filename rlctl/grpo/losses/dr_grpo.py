"""The loss of Dr. GRPO: the clipped surrogate, divided by a constant length."""

from dataclasses import dataclass
from typing import Any, Self

from rlctl.config.schema import GrpoConfig
from rlctl.grpo.losses.base import Mean
from rlctl.grpo.losses.grpo import ClippedLoss
from rlctl.grpo.losses.sections import DrGrpoLossSection


@dataclass(frozen=True, kw_only=True)
class DrGrpoLoss(ClippedLoss):
    """`ClippedLoss` summed over the update's tokens, over the number of rollouts times max_tokens.

    Dr. GRPO, arXiv 2503.20783, section 3.2: each rollout's mean over its own tokens would make a wrong answer cost less
    the longer it is. The metrics loss/* are means over tokens.
    """

    # L, the same for every rollout.
    max_tokens: int

    @classmethod
    def from_config(cls, config: GrpoConfig, **own: Any) -> Self:
        section = config.grpo.loss
        assert isinstance(section, DrGrpoLossSection)
        return super().from_config(
            config, **{"max_tokens": section.max_tokens or config.generation.max_new_tokens, **own}
        )

    @property
    def mean_over(self) -> Mean:
        return float(self.max_tokens)
