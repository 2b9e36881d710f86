"""Advantage of RLOO: a rollout's baseline is the mean reward of the other rollouts in its group."""

from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """A_i = r_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740).

    This equals (r_i - m) n / (n - 1), with m the mean of the group's n rewards. The baseline does not depend on r_i, so
    the gradient is unbiased. The gradient with group_mean is smaller by the factor (n - 1) / n. With `normalize_std`
    A_i is divided by s + 1e-6, with s the group's sample standard deviation. All advantages of a group with equal
    rewards, or with one rollout, are exactly 0.
    """

    normalize_std: bool

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        groups = rollouts.by_group(rollouts.reward)
        scale = groups.sizes / np.maximum(groups.sizes - 1, 1)
        if self.normalize_std:
            scale = scale / (groups.std + EPSILON)
        return groups.by_row(groups.centred * groups.spread(scale))
