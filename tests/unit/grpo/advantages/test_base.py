"""Input arrays of an advantage, the shapes that it may return, and how values become advantages of sampled tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.grpo.advantages.base import Advantage, Floats, ScoredRollouts, token_advantages, turn_of_tokens
from tests.scored import columns


@dataclass(frozen=True)
class FixedAdvantage(Advantage):
    """Advantage that returns the values of a test's function."""

    values: Callable[[ScoredRollouts], Any]

    def __call__(self, rollouts: ScoredRollouts) -> Floats | Sequence[Floats]:
        advantages: Floats = self.values(rollouts)
        return advantages


def spread_over_tokens(values: Any, turns: list[list[int]]) -> list[list[float]]:
    """Return for each rollout the advantages of its tokens. values: result of the advantage. turns: of each token."""
    rollouts = columns([0.0] * len(turns), [0] * len(turns), turns=turns)
    advantages = token_advantages(FixedAdvantage(lambda _: values), rollouts)
    return [of_rollout.tolist() for of_rollout in advantages]


def test_a_number_a_rollout_is_that_of_its_tokens() -> None:
    assert spread_over_tokens(np.array([0.5, -1.0]), [[0, 0, 0], [0]]) == [[0.5] * 3, [-1.0]]


def test_a_number_a_turn_is_that_of_the_turns_tokens() -> None:
    turns = [[0, 0, 1], [0, 1, 2, 2], [0, 0]]
    values = [np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0]), np.array([6.0])]
    assert spread_over_tokens(values, turns) == [[1, 1, 2], [3, 4, 5, 5], [6, 6]]


def test_a_number_a_token_is_its_own() -> None:
    values = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])]
    assert spread_over_tokens(values, [[0, 0, 1], [0, 0]]) == [[1, 2, 3], [4, 5]]


def test_rollouts_may_differ_in_what_they_have_a_number_for() -> None:
    values = [np.array(7.0), np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])]
    assert spread_over_tokens(values, [[0, 0], [0, 1, 1], [0, 0, 1]]) == [[7, 7], [1, 2, 2], [3, 4, 5]]


def test_a_rollout_without_a_token_has_no_advantages() -> None:
    assert spread_over_tokens(np.array([1.0, 2.0]), [[], [0]]) == [[], [2.0]]


def fail(rollouts: ScoredRollouts) -> Floats:
    return rollouts.rewards  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (fail, f"FixedAdvantage raised AttributeError at .*{Path(__file__).name}:.*'rewards'"),
        (lambda rollouts: None, f"FixedAdvantage returned None at .*{Path(__file__).name}:.*for each of 2 rollouts"),
    ],
)
def test_an_advantage_of_ones_own_that_fails_is_told_with_file_and_line(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_advantages(FixedAdvantage(values), columns([0.0, 1.0], [0, 0], turns=[[0], [0]]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(3), r"FixedAdvantage returned 3 advantages for 2 rollouts at .*; return one for each"),
        ([np.zeros(3), np.zeros(5)], r"rollout 1 advantages of shape \(5,\).* turns \(2,\).* sampled tokens \(3,\)"),
        ([np.zeros((3, 1)), np.zeros(3)], r"FixedAdvantage gave rollout 0 advantages of shape \(3, 1\)"),
        (np.array([0.0, np.nan]), r"FixedAdvantage gave rollout 1 an advantage that is not finite at .*: nan"),
        (np.array([1e300, 0.0]), r"FixedAdvantage gave rollout 0 an advantage that is not finite at .*: 1e\+300"),
    ],
)
def test_advantages_of_another_shape_or_not_finite_are_an_error_that_names_the_class(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spread_over_tokens(values, [[0, 0, 0], [0, 0, 1]])


@given(st.lists(st.booleans(), max_size=30))
def test_a_turn_is_an_unbroken_run_of_sampled_tokens(sampled: list[bool]) -> None:
    turns = []
    turn = -1
    was_sampled = False
    for is_sampled in sampled:
        if is_sampled and not was_sampled:
            turn += 1
        if is_sampled:
            turns.append(turn)
        was_sampled = is_sampled
    assert turn_of_tokens(np.array(sampled, np.bool_)).tolist() == turns


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward of rollout 2 \(group 8\) is -?(nan|inf)"):
        columns([0.0, 1.0, bad], [7, 7, 8])
    with pytest.raises(ValueError, match=r"reward brevity of rollout 1 \(group 7\) is -?(nan|inf)"):
        columns([0.0, 1.0, 2.0], [7, 7, 8], parts={"exact": [0, 1, 2], "brevity": [0, bad, 0]})


@pytest.mark.parametrize("groups", [[0], [[0, 0]], [0, 0, 0]])
def test_columns_of_unequal_length_are_an_error(groups: list[Any]) -> None:
    with pytest.raises(ValueError, match="one length"):
        columns([0.0, 1.0], groups)


def test_groups_are_rows_by_reward_and_some_of_the_rollouts_keep_their_columns() -> None:
    rollouts = columns(
        [3.0, 1.0, 2.0, 0.0], [5, 2, 5, 5], {"exact": [1.0, 2.0, 3.0, 4.0]}, {"exact": 0.5}, [True, False, True, False]
    )
    assert [rows.tolist() for rows in rollouts.groups()] == [[1], [3, 2, 0]]
    some = rollouts.select(np.array([False, True, False, True]))
    assert (some.group.tolist(), some.reward.tolist(), some.right.tolist()) == ([2, 5], [1.0, 0.0], [False, False])
    assert (some.parts["exact"].tolist(), some.weights) == ([2.0, 4.0], {"exact": 0.5})
    joined = ScoredRollouts.join([some, rollouts.select(np.array([0]))])
    assert (joined.reward.tolist(), joined.parts["exact"].tolist(), len(joined.turns)) == (
        [1.0, 0.0, 3.0],
        [2.0, 4.0, 1.0],
        3,
    )
    assert [*columns([], []).groups()] == []
