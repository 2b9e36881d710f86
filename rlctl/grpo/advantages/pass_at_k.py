"""The chance that one of k rollouts is right as the reward: pass@k training."""

import math
from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class PassAtK(Advantage):
    """Mean advantage of the subsets of k rollouts that a rollout is in, each rewarded with 1 if one of its rollouts is
    right.

    Of n rollouts w are wrong. A subset fails with probability f = C(w, k) / C(n, k), and one that has a certain wrong
    rollout with f' = C(w - 1, k - 1) / C(n - 1, k - 1). With s = sqrt(f (1 - f)):

        right: A = f / (s + 1e-6)        wrong: A = (f - f') / (s + 1e-6)

    (Pass@k training, arXiv 2508.10751, analytical derivation; the epsilon is its authors'.) It keeps the policy from
    settling on one way to answer. Rollouts are right or wrong by the reward that decides (`rewards.N.correct_at`);
    nothing else that they earn counts. A group with only right or only wrong rollouts, or of k or fewer, gets 0.
    """

    k: int

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        k = self.k
        advantages = np.zeros(len(rollouts))
        for rows in rollouts.groups():
            right = rollouts.right[rows]
            size = len(rows)
            num_wrong = size - int(right.sum())
            if num_wrong == 0 or size <= k:
                continue
            fails = math.comb(num_wrong, k) / math.comb(size, k)
            fails_with = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
            scale = math.sqrt(fails * (1 - fails)) + EPSILON
            advantages[rows] = np.where(right, fails, fails - fails_with) / scale
        return advantages
