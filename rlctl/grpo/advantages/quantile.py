"""Advantage of quantile advantage estimation (QAE): the baseline is a quantile of the group's rewards."""

from dataclasses import dataclass

import numpy as np

from rlctl.grpo.advantages.base import EPSILON, Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class QuantileBaseline(Advantage):
    """A_i = (r_i - b) / (s + 1e-6), with b the K-quantile of the group's rewards (QAE, arXiv 2509.22611, equation 3).

    K is `quantile`. b is the smallest reward such that at least a share K of the group's rewards are <= b. s is the
    group's sample standard deviation. Take rewards of 0 and 1: if at most a share 1 - K of a group is right, only its
    right rollouts have an advantage, otherwise only its wrong rollouts (equation 4). This bounds the policy's entropy
    from above and below. All advantages of a group with equal rewards, or with one rollout, are exactly 0.
    """

    quantile: float

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        groups = rollouts.by_group(rollouts.reward)
        rank = np.ceil(self.quantile * groups.sizes).astype(np.intp)
        # Correct the rank, because the product above is rounded: take the smallest rank with rank / size >= K.
        rank += rank / groups.sizes < self.quantile
        rank -= (rank - 1) / groups.sizes >= self.quantile
        baseline = groups.values[groups.starts + rank - 1]
        scale = groups.spread(1 / (groups.std + EPSILON))
        return groups.by_row((groups.values - groups.spread(baseline)) * scale)
