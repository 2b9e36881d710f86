"""Advantages: what each rollout's reward is worth within its group, the rollouts of one prompt.

Groups are told apart by prompt identity, never by equal prompts. Pure numpy; exact under permutation: the order
of rollouts changes no bit of any rollout's advantage.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlctl.config.algorithm_schema import AnyAdvantageSection, UserAdvantageSection

# Keeps the division finite for groups that differ by rounding alone; the value verl and NeMo-RL use.
_EPSILON = 1e-6


def advantages(rewards: ArrayLike, groups: ArrayLike, config: AnyAdvantageSection) -> NDArray[np.float32]:
    """Return the advantage, float32 [n], of each rollout; rewards: float [n]; groups: int [n], any ids, in any order.

    With n_g rollouts of mean m_g in a group (n_g may differ, failed rollouts being left out before):

    - group_mean: A_i = r_i - m_g (arXiv 2402.03300, section 4.1).
    - leave_one_out: A_i = r_i - mean of the others = (r_i - m_g) n_g / (n_g - 1) (RLOO, arXiv 2402.14740).
    - normalize_std: A_i is divided by s_g + 1e-6, s_g the group's sample standard deviation (divisor n_g - 1),
      with either baseline (arXiv 2402.03300 divides; Dr. GRPO, arXiv 2503.20783, shows the bias it brings).

    A rollout alone in its group has nothing to be compared with, so it gets 0; rollouts of a group whose rewards
    are all equal get exactly 0. ValueError: a reward that is not finite, or shapes that do not match.
    """
    assert not isinstance(config, UserAdvantageSection)
    values, order, starts, sizes = _sorted_by_group(rewards, groups)
    if not len(values):
        return np.zeros(0, np.float32)
    others = np.maximum(sizes - 1, 1)
    centred = values - np.repeat(np.add.reduceat(values, starts) / sizes, sizes)
    scale = sizes / others if config.name == "leave_one_out" else np.ones(len(sizes))
    if config.normalize_std:
        scale = scale / (np.sqrt(np.add.reduceat(centred**2, starts) / others) + _EPSILON)
    scale[_equal_ends(values, starts, sizes)] = 0.0
    result = np.empty(len(values), np.float32)
    result[order] = centred * np.repeat(scale, sizes)
    return result


def _sorted_by_group(
    rewards: ArrayLike, groups: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return rewards sorted by (group, reward), the order that sorts them, and each group's first place and size."""
    values, ids = np.asarray(rewards, np.float64), np.asarray(groups)
    if values.ndim != 1 or values.shape != ids.shape:
        raise ValueError(f"rewards {values.shape} and groups {ids.shape} must be of one length, one number each")
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward of rollout {first} (group {ids[first]}) is {values[first]}, not a finite number")
    order = np.lexsort((values, ids))
    _, starts, sizes = np.unique(ids[order], return_index=True, return_counts=True)
    return values[order], order, starts, sizes


def _equal_ends(values: NDArray[np.float64], starts: NDArray[np.intp], sizes: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return bool [groups]: smallest reward equals largest. A mean's rounding must hide no uniform group."""
    uniform: NDArray[np.bool_] = values[starts] == values[starts + sizes - 1]
    return uniform
