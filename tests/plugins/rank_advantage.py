# my_advantage.py
from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class RankAdvantage(Advantage):
    """Rank of a rollout's reward in its group, from -most (worst) to most (best); 0 where all are equal."""

    most: float = 1.0

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        advantages = np.zeros(len(rollouts))
        for rows in rollouts.groups():
            rewards = rollouts.reward[rows]
            lead = (rewards[:, None] > rewards).sum(axis=1) - (rewards[:, None] < rewards).sum(axis=1)
            advantages[rows] = self.most * lead / max(1, len(rows) - 1)
        return advantages
