"""Groups that teach nothing (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

A rollout with advantage 0 has no gradient. A step with many such groups learns from few rollouts, and its gradient is
noisy. `RolloutBuffer` samples other groups in their place.
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

    rewards, right: rewards and correctness of the rollouts that count in the group's baseline. With `by` "rewards" a
    group teaches nothing if all rewards are equal, so that every advantage is 0. With "accuracy" it teaches nothing if
    all answers are right or all are wrong (arXiv 2503.14476, equation 11), even if rewards for length, say, differ.
    """
    if by == "rewards":
        return UNIFORM if len(set(rewards)) == 1 else None
    if by == "accuracy" and len(set(right)) == 1:
        return RIGHT if right[0] else WRONG
    return None


def why_left_out(scored: Sequence[tuple[Rollout, float]], config: GrpoSection) -> str | None:
    """Return the reason why no rollout of a group is trained; None if at least one is trained.

    scored: the rollouts that count in the group's baseline, and their rewards.
    """
    if config.overlong.mask and all(rollout.is_cut for rollout, _ in scored):
        return TRUNCATED
    right = [rollout.score is not None and rollout.score.right for rollout, _ in scored]
    return why_nothing([reward for _, reward in scored], right, config.dynamic_sampling.filter)
