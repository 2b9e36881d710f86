"""Advantage of GRPO: the baseline is the mean reward of the group."""

from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class GroupMean(Advantage):
    """A_i = r_i - m, with m the mean of the group's rewards (GRPO, arXiv 2402.03300, section 4.1).

    With `normalize_std` A_i is divided by s + 1e-6, with s the group's sample standard deviation. The GRPO paper
    divides. Dr. GRPO (arXiv 2503.20783) shows that this division favours tasks that are nearly always or nearly never
    solved. All advantages of a group with equal rewards, or with one rollout, are exactly 0.
    """

    normalize_std: bool

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        groups = rollouts.by_group(rollouts.reward)
        scale = 1 / (groups.std + EPSILON) if self.normalize_std else np.ones(len(groups.sizes))
        return groups.by_row(groups.centred * groups.spread(scale))
