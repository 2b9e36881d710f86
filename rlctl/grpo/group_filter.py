"""Finds groups that teach nothing (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

A rollout with advantage 0 has no gradient. If all rollouts of many groups have advantage 0, a step learns from few
rollouts, and its gradient is noisy. `RolloutBuffer` replaces such groups by newly sampled ones.
"""

from collections.abc import Sequence
from typing import Literal

from rlctl.config.grpo_schema import GrpoSection
from rlctl.rollout.types import Rollout

UNIFORM = "all rewards equal"
RIGHT = "all answers right"
WRONG = "all answers wrong"
TRUNCATED = "all answers cut at generation.max_new_tokens"
Filter = Literal["rewards", "accuracy"] | None


def why_nothing(rewards: Sequence[float], right: Sequence[bool], by: Filter) -> str | None:
    """Return the reason why a group teaches nothing; None if it teaches something, or if `by` is None.

    by: "rewards" if a group with equal rewards teaches nothing, because every advantage is 0. "accuracy" if a group
    with only right or only wrong answers teaches nothing (arXiv 2503.14476, equation 11), even if rewards differ, for
    example by a length penalty. rewards, right: rewards and correctness of the rollouts in the group's baseline.
    """
    if by == "rewards":
        return UNIFORM if len(set(rewards)) == 1 else None
    if by == "accuracy" and len(set(right)) == 1:
        return RIGHT if right[0] else WRONG
    return None


def why_left_out(scored: Sequence[tuple[Rollout, float]], config: GrpoSection) -> str | None:
    """Return the reason why no rollout of a group is trained; None if at least one is trained.

    scored: (rollout, reward) of the rollouts in the group's baseline.
    """
    if config.overlong.mask and all(rollout.is_cut for rollout, _ in scored):
        return TRUNCATED
    right = [rollout.score is not None and rollout.score.right for rollout, _ in scored]
    return why_nothing([reward for _, reward in scored], right, config.dynamic_sampling.filter)
