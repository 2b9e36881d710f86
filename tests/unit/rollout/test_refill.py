"""Refill: how many groups replace groups that teach nothing, and which groups a synchronous step trains."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.data.tasks import Task
from rlctl.rollout.groups import GroupState, GroupTable
from rlctl.rollout.refill import STEPS, RefillRule
from rlctl.rollout.staleness import StalenessRule
from rlctl.rollout.types import Rollout
from tests.turns import turn


@given(st.integers(1, 64), st.floats(0, 5), st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=8))
def test_it_begins_what_is_missing_at_least_and_no_more_than_the_budget(
    size: int, max_extra: float, steps: list[tuple[int, int]]
) -> None:
    rule = RefillRule(size, max_extra)
    for filtered, taught in steps:
        rule.note_step(filtered, filtered + taught)
    for ready in range(size + 1):
        for filtered in range(rule.budget + 1):
            upper_bound = size + rule.budget - filtered
            assert min(size, upper_bound) <= rule.in_flight(filtered, ready) <= upper_bound


def test_before_anything_was_filtered_it_begins_one_for_one() -> None:
    rule = RefillRule(8, 3.0)
    assert [rule.in_flight(0, ready) for ready in range(9)] == [8] * 9


def test_it_expects_the_share_of_the_last_steps_and_less_of_it_as_places_fill() -> None:
    rule = RefillRule(10, 3.0)
    for _ in range(20):
        rule.note_step(15, 25)
    # 60 of 100 groups were filtered; with a step's worth that is presumed to teach, 60 of 110.
    assert rule.in_flight(0, 0) == 22
    assert rule.in_flight(6, 4) < rule.in_flight(0, 0)
    assert rule.in_flight(15, 10) == 10
    assert rule.in_flight(29, 0) == 10 + 30 - 29
    resumed = RefillRule(10, 3.0)
    resumed.load_state_dict(rule.state_dict())
    assert resumed.in_flight(3, 2) == rule.in_flight(3, 2)
    assert len(rule.state_dict()) == STEPS


def make_task(number: int) -> Task:
    return Task(f"t{number}", [1], "", None)


def make_table(size: int, budget: int, count: int) -> GroupTable:
    """Return the table of a synchronous run that has admitted `count` groups."""
    groups = GroupTable(StalenessRule(size, 0, "windowed_fifo", 0.3), budget)
    groups.admit({number: make_task(number) for number in range(count)}, 0)
    return groups


def list_in_state(groups: GroupTable, state: GroupState) -> list[int]:
    return [group.number for group in groups.in_state(state)]


def end_group(groups: GroupTable, number: int, *, is_useless: bool) -> None:
    groups[number].rollouts = {0: Rollout(turn(number).id.rollout, [], "stop")}
    groups.mark_sampled(number)
    groups.mark_scored(number, "nothing" if is_useless else None)


@given(st.integers(1, 4), st.integers(0, 6), st.lists(st.booleans(), min_size=10, max_size=10), st.randoms())
def test_a_synchronous_step_takes_the_first_that_teach_whoever_ends_first(
    size: int, budget: int, are_useless: list[bool], order: random.Random
) -> None:
    groups = make_table(size, budget, size + budget)
    expected = list[int]()
    num_replaced = 0
    for number in range(size + budget):
        if are_useless[number] and num_replaced < budget:
            num_replaced += 1
        else:
            expected.append(number)
    expected = expected[:size]
    chosen = groups.select(0)
    while chosen is None:
        number = order.choice(list_in_state(groups, GroupState.SAMPLING))
        end_group(groups, number, is_useless=are_useless[number])
        chosen = groups.select(0)
    assert chosen == expected
    groups.take(chosen, 0)
    surplus = groups.surplus()
    assert [group.number for group in surplus] == sorted(set(range(expected[-1] + 1, size + budget)))
    groups.put_off(surplus)
    assert groups.release() == list(range(expected[-1] + 1))
    assert list_in_state(groups, GroupState.DEFERRED) == [group.number for group in surplus]
    assert groups.room == size + budget


def test_without_budget_a_group_that_teaches_nothing_takes_its_place() -> None:
    groups = make_table(2, 0, 2)
    end_group(groups, 1, is_useless=True)
    end_group(groups, 0, is_useless=True)
    assert groups.select(0) == [0, 1]


def test_an_asynchronous_step_replaces_no_more_than_its_budget_and_the_window_closes_up() -> None:
    groups = GroupTable(StalenessRule(2, 1, "windowed_fifo", 0.0), budget=1)
    groups.admit({number: make_task(number) for number in range(4)}, 0)
    assert groups.room == 0
    end_group(groups, 1, is_useless=True)
    end_group(groups, 2, is_useless=True)
    assert list_in_state(groups, GroupState.FILTERED) == [1, 2] and groups.room == 2
    groups.admit({number: make_task(number) for number in (4, 5)}, 0)
    # The window is of two groups from the oldest on, 0 and 3.
    assert [group.place for group in groups.in_state(GroupState.SAMPLING)] == [0, 1, 2, 3]
    end_group(groups, 3, is_useless=True)
    assert groups[3].state is GroupState.READY
    assert groups.select_part(0) == [3]
    groups.take([3], 0)
    assert groups.release() == [1, 2, 3]
    # A step that is over has brought the budget of the next.
    end_group(groups, 4, is_useless=True)
    end_group(groups, 5, is_useless=True)
    assert [groups[number].state for number in (4, 5)] == [GroupState.FILTERED, GroupState.READY]


@pytest.mark.parametrize("state", ["filtered", "deferred"])
def test_a_checkpoint_between_steps_has_who_was_filtered_and_who_was_put_off(state: str) -> None:
    groups = make_table(1, 2, 3)
    end_group(groups, 0, is_useless=True)
    if state == "deferred":
        groups.put_off([groups[0]])
    resumed = make_table(1, 2, 0)
    resumed.load_state_dict(groups.state_dict(), 0, make_task, {})
    assert resumed[0].state is GroupState(state)
    assert resumed[0].reason == ("nothing" if state == "filtered" else "")
