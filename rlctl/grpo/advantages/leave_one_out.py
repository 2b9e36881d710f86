"""The mean of the others in the group as the baseline: RLOO."""

from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """A_i = r_i - mean of the others = (r_i - m) n / (n - 1), with m the group's mean (RLOO, arXiv 2402.14740).

    The baseline does not depend on r_i, so that the gradient is unbiased; group_mean's is smaller by (n - 1) / n.
    normalize_std: A_i / (s + 1e-6), with s the group's sample standard deviation. A uniform group, and a rollout that
    is alone in its group, get exactly 0.
    """

    normalize_std: bool

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        groups = rollouts.by_group(rollouts.reward)
        scale = groups.sizes / np.maximum(groups.sizes - 1, 1)
        if self.normalize_std:
            scale = scale / (groups.std + EPSILON)
        return groups.by_row(groups.centred * groups.spread(scale))
