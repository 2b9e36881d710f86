"""GRPO's advantage, and at each token a pull towards the teacher."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class Taught(Advantage):
    """Reward minus the mean of its group, plus coef * log(teacher / sampler) at each token, within +-bound."""

    columns: ClassVar[tuple[str, ...]] = ("rollout_log_prob", "teacher_log_prob")
    coef: float = 0.5
    bound: float = 5.0

    def __call__(self, rollouts: ScoredRollouts) -> list[Floats]:
        groups = rollouts.by_group(rollouts.reward)
        advantages = groups.by_row(groups.centred)
        sampled = rollouts.columns["rollout_log_prob"]
        taught = rollouts.columns["teacher_log_prob"]
        pulls = [np.clip(row - own_row, -self.bound, self.bound) for row, own_row in zip(taught, sampled)]
        return [advantage + self.coef * pull for advantage, pull in zip(advantages, pulls)]
