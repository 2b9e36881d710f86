"""An advantage with more weight for tasks of few right rollouts."""

from dataclasses import dataclass

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts


@dataclass(frozen=True)
class Focal(Advantage):
    """(r - m) (1 - p)^focus, with m the mean reward of the rollout's group and p its share of right rollouts."""

    focus: float = 1.0

    def __call__(self, rollouts: ScoredRollouts) -> Floats:
        rewards = rollouts.by_group(rollouts.reward)
        share_right = rollouts.by_group(rollouts.right).mean
        weight = rewards.spread((1 - share_right) ** self.focus)
        return rewards.by_row(rewards.centred * weight)
