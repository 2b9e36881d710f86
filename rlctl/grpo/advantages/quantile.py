"""A quantile of the group as the baseline: quantile advantage estimation."""

from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class QuantileBaseline(Advantage):
    """A_i = (r_i - b) / (s + 1e-6), with b the `quantile` K of the group's rewards (QAE, arXiv 2509.22611, equation 3).

    b is the least reward that a share of at least K of the group does not exceed; s is the group's sample standard
    deviation. With rewards of 0 and 1 a group of which a share of at most 1 - K is right learns from its right rollouts
    alone, any other from its wrong ones (equation 4). That bounds the policy's entropy on both sides. A uniform group,
    and a rollout that is alone in its group, get exactly 0.
    """

    quantile: float

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        groups = rollouts.by_group(rollouts.reward)
        rank = np.ceil(self.quantile * groups.sizes).astype(np.intp)
        # The least rank with rank / size >= K: the product above is rounded.
        rank += rank / groups.sizes < self.quantile
        rank -= (rank - 1) / groups.sizes >= self.quantile
        baseline = groups.values[groups.starts + rank - 1]
        scale = groups.spread(1 / (groups.std + EPSILON))
        return groups.by_row((groups.values - groups.spread(baseline)) * scale)
