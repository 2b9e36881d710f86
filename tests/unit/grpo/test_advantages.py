"""Advantages: formulas against per-rollout loops, groups by identity, uniform groups, bad rewards."""

import statistics
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.algorithm_schema import AnyAdvantageSection, GroupMeanSection, LeaveOneOutSection
from rlctl.grpo.advantages import advantages

KINDS = [("group_mean", GroupMeanSection), ("leave_one_out", LeaveOneOutSection)]
SECTIONS = [kind(name, s) for (name, kind), s in product(KINDS, (False, True))]  # type: ignore[operator]
PLAIN, STD, LOO, LOO_STD = SECTIONS
sections = pytest.mark.parametrize("config", SECTIONS, ids=lambda c: f"{c.name}{'-std' * c.normalize_std}")
rollouts = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)), min_size=1, max_size=30)


def reference(rewards: list[float], groups: list[int], config: AnyAdvantageSection) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        members = [r for r, g in zip(rewards, groups) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        if len(set(members)) == 1:
            result.append(0.0)
            continue
        baseline = statistics.fmean(others if config.name == "leave_one_out" else members)
        scale = statistics.stdev(members) + 1e-6 if config.normalize_std else 1.0
        result.append((reward - baseline) / scale)
    return result


@sections
@given(rollouts)
def test_equals_the_definition(config: AnyAdvantageSection, pairs: list[tuple[float, int]]) -> None:
    rewards, groups = map(list, zip(*pairs))
    result = advantages(rewards, groups, config)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, reference(rewards, groups, config), rtol=1e-5, atol=1e-4)


def test_worked_example_with_groups_of_unequal_size() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.0], [7, 7, 7, 4, 4]
    np.testing.assert_allclose(advantages(rewards, groups, PLAIN), [2 / 3, -1 / 3, -1 / 3, 1 / 2, -1 / 2])
    np.testing.assert_allclose(advantages(rewards, groups, LOO), [1, -1 / 2, -1 / 2, 1, -1])


def test_std_is_the_sample_standard_deviation_plus_a_millionth() -> None:
    std = 2**0.5 + 1e-6
    np.testing.assert_allclose(advantages([0.0, 2.0], [0, 0], STD), [-1 / std, 1 / std], rtol=1e-6)
    np.testing.assert_allclose(advantages([0.0, 2.0], [0, 0], LOO_STD), [-2 / std, 2 / std], rtol=1e-6)


@sections
@given(st.lists(st.integers(0, 4).map(lambda k: k * 0.1), min_size=2, max_size=12), st.randoms())
def test_the_order_of_rollouts_changes_no_bit(config: AnyAdvantageSection, rewards: list[float], random: Any) -> None:
    groups = [i % 3 for i in range(len(rewards))]
    order = random.sample(range(len(rewards)), len(rewards))
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], config)
    np.testing.assert_array_equal(shuffled, advantages(rewards, groups, config)[order])


@sections
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6), st.lists(st.floats(-10, 10), min_size=2))
def test_one_groups_rewards_do_not_touch_another_group(
    config: AnyAdvantageSection, first: list[float], second: list[float]
) -> None:
    together = advantages(first + second, [5] * len(first) + [2] * len(second), config)
    np.testing.assert_array_equal(together[: len(first)], advantages(first, [0] * len(first), config))
    np.testing.assert_array_equal(together[len(first) :], advantages(second, [0] * len(second), config))


def test_the_same_prompt_drawn_twice_is_two_groups() -> None:
    """Equal prompts, and even equal rewards in them, do not merge: only the identity counts."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(advantages(rewards, [0, 0, 1, 1], PLAIN), [0.5, -0.5, 0.0, 0.0])
    np.testing.assert_allclose(advantages(rewards, [0, 0, 0, 0], PLAIN), [0.25, -0.75, 0.25, 0.25])


@sections
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_uniform_group_gets_exactly_zero(config: AnyAdvantageSection, reward: float, size: int) -> None:
    assert not advantages([reward] * size, [0] * size, config).any()


@sections
def test_a_group_equal_but_for_rounding_does_not_explode(config: AnyAdvantageSection) -> None:
    assert np.abs(advantages([0.1 + 0.2, 0.3, 0.3], [0, 0, 0], config)).max() < 1e-9


@sections
def test_no_rollouts_have_no_advantages(config: AnyAdvantageSection) -> None:
    assert advantages([], [], config).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward of rollout 2 \(group 8\) is -?(nan|inf)"):
        advantages([0.0, 1.0, bad], [7, 7, 8], PLAIN)


@pytest.mark.parametrize("groups", [[0], [[0, 0]], [0, 0, 0]])
def test_shapes_that_do_not_match_are_an_error(groups: list[Any]) -> None:
    with pytest.raises(ValueError, match="one length"):
        advantages([0.0, 1.0], groups, PLAIN)
