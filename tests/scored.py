"""Makes `ScoredRollouts` for tests of advantages."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlctl.grpo.advantages.base import Advantage, ScoredRollouts, token_advantages


def columns(
    rewards: Sequence[float],
    groups: Sequence[int],
    parts: Mapping[str, Sequence[float]] | None = None,
    weights: Mapping[str, float] | None = None,
    right: Sequence[bool] | None = None,
    turns: Sequence[Sequence[int]] | None = None,
) -> ScoredRollouts:
    """Return scored rollouts. turns: for each rollout the turn of each sampled token; by default one token each."""
    if right is None:
        right = [False] * len(rewards)
    if turns is None:
        turns = [[0]] * len(rewards)
    return ScoredRollouts(
        group=np.asarray(groups, np.int64),
        reward=np.asarray(rewards, np.float64),
        parts={name: np.asarray(part_rewards, np.float64) for name, part_rewards in (parts or {}).items()},
        weights=weights or {},
        right=np.asarray(right, np.bool_),
        turns=[np.asarray(turn_numbers, np.int64) for turn_numbers in turns],
    )


def first_tokens(advantage: Advantage, rollouts: ScoredRollouts) -> NDArray[np.float32]:
    """Return the advantage of each rollout's first token, float32 [n]."""
    return np.array([advantages[0] for advantages in token_advantages(advantage, rollouts)], np.float32)
