"""Advantages from a critic, with a lambda that grows with the length of the answer."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class LengthAdaptive(Advantage):
    """GAE with lambda = 1 - 1 / (alpha * tokens) for the policy, and the reward as the critic's target (VAPO)."""

    columns: ClassVar[tuple[str, ...]] = ("value",)
    alpha: float = 2.0

    def __call__(self, rollouts: ScoredRollouts) -> list[Floats]:
        advantages = []
        for values, reward in zip(rollouts.columns["value"], rollouts.reward):
            before = values[:, 0].astype(np.float64)
            deltas = np.append(before[1:], reward) - before
            lam = max(0.0, 1 - 1 / (self.alpha * len(deltas)))
            discounts = lam ** np.arange(len(deltas))
            sums = [discounts[: len(deltas) - start] @ deltas[start:] for start in range(len(deltas))]
            advantages.append(np.array(sums))
        return advantages

    def learned_columns(self, rollouts: ScoredRollouts) -> dict[str, list[Floats]]:
        rows = zip(rollouts.num_sampled.tolist(), rollouts.reward)
        return {"return": [np.full(tokens, reward) for tokens, reward in rows]}
