"""Advantage of GDPO: each reward is normalised in its group before rewards are summed."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlctl.config.grpo_schema import AdvantageScope
from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts, normalize


@dataclass(frozen=True)
class Gdpo(Advantage):
    """A_i = sum over the rewards k of w_k (r_ki - m_k) / (s_k + 1e-6), then normalised over the step's rollouts.

    m_k and s_k are the mean and sample standard deviation of reward k in the group, and w_k is the reward's weight
    (GDPO, arXiv 2601.05242, equations 4, 6 and 7). Rollouts with different rewards of equal sum get different
    advantages. A reward with a small range counts as much as a reward with a large range. A length penalty counts as
    one of the rewards. A reward that is equal for a whole group adds exactly 0. If all sums of the step are equal, each
    advantage is exactly 0.
    """

    scope: ClassVar[AdvantageScope] = "batch"

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        total = np.zeros(len(rollouts))
        for name, part in rollouts.parts.items():
            groups = rollouts.by_group(part)
            total += rollouts.weights[name] * groups.by_row(groups.centred * groups.spread(1 / (groups.std + EPSILON)))
        return normalize(total)
