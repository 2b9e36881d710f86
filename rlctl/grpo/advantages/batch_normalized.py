"""Advantage of REINFORCE++: rewards normalised over the whole step."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.config.grpo_schema import AdvantageScope
from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts, normalize


@dataclass(frozen=True)
class BatchNormalized(Advantage):
    """A_i = (a_i - M) / (S + 1e-6), with M and S the mean and deviation over all sampled tokens of the step.

    With `baseline` "none", a_i is the reward r_i (REINFORCE++, arXiv 2501.03262, section 3.1). With "group_mean" it is
    r_i - m, with m the mean reward of the group (REINFORCE++ with baseline, section 3.2). Each token counts once, as in
    verl's `masked_whiten`, so the advantages of the step's tokens sum to 0. S hardly depends on one r_i, unlike the
    deviation of a group, so the estimate becomes unbiased as the batch grows. If all a_i are equal, each A_i is exactly
    0.
    """

    scope: ClassVar[AdvantageScope] = "batch"

    baseline: Literal["none", "group_mean"]

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        values = rollouts.reward
        if self.baseline == "group_mean":
            groups = rollouts.by_group(values)
            values = groups.by_row(groups.centred)
        return normalize(values, rollouts.num_sampled)
