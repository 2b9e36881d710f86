"""Advantage of pass@k training: the reward is the chance that at least one of k rollouts is right."""

import math
from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class PassAtK(Advantage):
    """A_i = mean advantage of all subsets of k rollouts that contain rollout i.

    The reward of a subset is 1 if at least one of its rollouts is right, else 0. w of the group's n rollouts are wrong.
    A random subset gets 0 with probability f = C(w, k) / C(n, k). A subset that contains a given wrong rollout gets 0
    with probability f' = C(w - 1, k - 1) / C(n - 1, k - 1). With s = sqrt(f (1 - f)):

        right: A = f / (s + 1e-6)        wrong: A = (f - f') / (s + 1e-6)

    Source, with this epsilon: Pass@k training, arXiv 2508.10751, analytical derivation. The advantage keeps the policy
    from settling on one way to answer. A rollout is right or wrong by `rewards.N.correct_at`, and no other reward
    counts. A group with only right or only wrong rollouts, or with at most k rollouts, gets 0.
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
