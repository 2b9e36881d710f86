"""Each reward normalised in its group before the sum: GDPO."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlctl.config.grpo_schema import AdvantageScope
from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts, normalize


@dataclass(frozen=True)
class Gdpo(Advantage):
    """Sum of w_k (r_ki - m_k) / (s_k + 1e-6) over the rewards k, normalised over the rollouts of the step.

    m_k and s_k are the mean and sample standard deviation of reward k in the group, w_k its weight (GDPO, arXiv
    2601.05242, equations 4, 6 and 7). Rollouts whose rewards differ, but have the same sum, stay apart, and a reward of
    a small range counts as much as one of a large. A penalty for length is one of the rewards. A reward that all
    rollouts of a group share adds exactly 0 there; where all sums are equal, each advantage is exactly 0.
    """

    scope: ClassVar[AdvantageScope] = "batch"

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        total = np.zeros(len(rollouts))
        for name, part in rollouts.parts.items():
            groups = rollouts.by_group(part)
            total += rollouts.weights[name] * groups.by_row(groups.centred * groups.spread(1 / (groups.std + EPSILON)))
        return normalize(total)
