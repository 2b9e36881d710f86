# reference_pull.py
from dataclasses import dataclass
from typing import ClassVar

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class ReferencePull(Advantage):
    """Reward minus the mean of its group, plus at each token coef * log(ref / mu), a pull back to the reference."""

    columns: ClassVar[tuple[str, ...]] = ("rollout_log_prob", "reference_log_prob")
    coef: float = 0.1

    def __call__(self, rollouts: ScoredRollouts) -> list[Floats]:
        by_group = rollouts.by_group(rollouts.reward)
        pairs = zip(*(rollouts.columns[name] for name in self.columns))
        pulls = (self.coef * (reference - sampled) for sampled, reference in pairs)
        return [float(advantage) + pull for advantage, pull in zip(by_group.by_row(by_group.centred), pulls)]
