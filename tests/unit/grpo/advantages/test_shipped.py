"""Every advantage that rlctl has equals its definition, in plain Python, whatever the order, groups and sizes."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.grpo.advantages.base import Advantage
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.leave_one_out import LeaveOneOut
from tests.scored import columns, first_tokens

# A rollout: reward, group.
Rows = list[tuple[float, int]]
PLAIN, STD, LOO, LOO_STD = GroupMean(False), GroupMean(True), LeaveOneOut(False), LeaveOneOut(True)
ALL = [PLAIN, STD, LOO, LOO_STD]
every = pytest.mark.parametrize("advantage", ALL, ids=str)
rollouts = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)), min_size=1, max_size=30)


def advantages(advantage: Advantage, rewards: list[float], groups: list[int]) -> Any:
    return first_tokens(advantage, columns(rewards, groups))


def group_mean(rows: Rows, own: int, normalize: bool, others: bool) -> float:
    reward, group = rows[own]
    members = [r for r, g in rows if g == group]
    if len(set(members)) == 1:
        return 0.0
    against = [r for i, (r, g) in enumerate(rows) if g == group and i != own] if others else members
    return (reward - statistics.fmean(against)) / (statistics.stdev(members) + 1e-6 if normalize else 1.0)


REFERENCES: list[Callable[[Rows, int], float]] = [
    lambda rows, own: group_mean(rows, own, False, False),
    lambda rows, own: group_mean(rows, own, True, False),
    lambda rows, own: group_mean(rows, own, False, True),
    lambda rows, own: group_mean(rows, own, True, True),
]


@pytest.mark.parametrize(("advantage", "reference"), zip(ALL, REFERENCES), ids=map(str, ALL))
@given(rollouts)
def test_equals_the_definition(advantage: Advantage, reference: Any, rows: Rows) -> None:
    result = advantages(advantage, *map(list, zip(*rows)))  # type: ignore[arg-type]
    expected = [reference(rows, own) for own in range(len(rows))]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_worked_example_with_groups_of_unequal_size() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.0], [7, 7, 7, 4, 4]
    np.testing.assert_allclose(advantages(PLAIN, rewards, groups), [2 / 3, -1 / 3, -1 / 3, 1 / 2, -1 / 2])
    np.testing.assert_allclose(advantages(LOO, rewards, groups), [1, -1 / 2, -1 / 2, 1, -1])


def test_std_is_the_sample_standard_deviation_plus_a_millionth() -> None:
    std = 2**0.5 + 1e-6
    np.testing.assert_allclose(advantages(STD, [0.0, 2.0], [0, 0]), [-1 / std, 1 / std], rtol=1e-6)
    np.testing.assert_allclose(advantages(LOO_STD, [0.0, 2.0], [0, 0]), [-2 / std, 2 / std], rtol=1e-6)


@every
@given(st.lists(st.integers(0, 4).map(lambda k: k * 0.1), min_size=2, max_size=12), st.randoms())
def test_the_order_of_rollouts_changes_no_bit(advantage: Advantage, rewards: list[float], random: Any) -> None:
    groups = [i % 3 for i in range(len(rewards))]
    order = random.sample(range(len(rewards)), len(rewards))
    shuffled = advantages(advantage, [rewards[i] for i in order], [groups[i] for i in order])
    np.testing.assert_array_equal(shuffled, advantages(advantage, rewards, groups)[order])


@every
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6), st.lists(st.floats(-10, 10), min_size=2))
def test_one_groups_rewards_do_not_touch_another_group(
    advantage: Advantage, first: list[float], second: list[float]
) -> None:
    together = advantages(advantage, first + second, [5] * len(first) + [2] * len(second))
    np.testing.assert_array_equal(together[: len(first)], advantages(advantage, first, [0] * len(first)))
    np.testing.assert_array_equal(together[len(first) :], advantages(advantage, second, [0] * len(second)))


def test_the_same_prompt_drawn_twice_is_two_groups() -> None:
    """Equal prompts, and even equal rewards in them, do not merge: only the identity counts."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(advantages(PLAIN, rewards, [0, 0, 1, 1]), [0.5, -0.5, 0.0, 0.0])
    np.testing.assert_allclose(advantages(PLAIN, rewards, [0, 0, 0, 0]), [0.25, -0.75, 0.25, 0.25])


@every
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_uniform_group_gets_exactly_zero(advantage: Advantage, reward: float, size: int) -> None:
    assert not advantages(advantage, [reward] * size, [0] * size).any()


@every
def test_a_group_equal_but_for_rounding_does_not_explode(advantage: Advantage) -> None:
    assert np.abs(advantages(advantage, [0.1 + 0.2, 0.3, 0.3], [0, 0, 0])).max() < 1e-9


@every
def test_no_rollouts_have_no_advantages(advantage: Advantage) -> None:
    assert advantages(advantage, [], []).shape == (0,)
