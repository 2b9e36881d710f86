"""Contracts 1 and 2 under any order of groups that finish, fail, are resampled or resumed."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.tasks import Task
from rlctl.preflight.load import load
from rlctl.rollout.groups import GroupState, GroupTable
from rlctl.rollout.staleness import StalenessRule, TrainingOrder

SAMPLING, SAMPLED = GroupState.SAMPLING, GroupState.SAMPLED
POLICIES: tuple[TrainingOrder, ...] = ("windowed_fifo", "in_order", "ready_first")


def make_task(number: int) -> Task:
    return Task(f"t{number}", [1], "", None)


class NumberedTable(GroupTable):
    """Group table whose admitted groups are numbered 0, 1, 2 and so on."""

    next = 0

    def __init__(self, prompts: int, max_age: int, policy: TrainingOrder, window: float) -> None:
        super().__init__(StalenessRule(prompts, max_age, policy, window))

    def fill(self, version: int) -> list[int]:
        numbers = list(range(self.next, self.next + self.room))
        self.next += len(numbers)
        self.admit({number: make_task(number) for number in numbers}, version)
        return numbers

    def ready(self, number: int) -> None:
        self.mark_scored(number, None)

    def list_in_state(self, *states: GroupState) -> list[int]:
        return [group.number for group in self.in_state(*states)]

    def resume(self, state: dict[str, Any], version: int) -> list[int]:
        """Load a saved state. Return the numbers of the groups that must be sampled again."""
        ready = {group["number"]: list[Any]() for group in state["groups"]}
        return [group.number for group in self.load_state_dict(state, version, make_task, ready)]


def finish(staleness: NumberedTable, *numbers: int) -> None:
    for number in numbers:
        staleness.mark_sampled(number)
        staleness.ready(number)


def make_step(staleness: NumberedTable, version: int, numbers: list[int]) -> None:
    """Train the groups with these numbers at `version`, and admit groups for the next step."""
    staleness.take(numbers, version)
    staleness.release()
    staleness.fill(version + 1)


class Schedule:
    """A run of the state machine in which everything random is drawn from one seed."""

    def __init__(self, seed: int, prompts: int, max_age: int, policy: TrainingOrder, parts: bool) -> None:
        self.parts = parts
        self.random = random.Random(seed)
        self.prompts = prompts
        self.max_age = max_age
        self.policy: TrainingOrder = policy
        self.staleness = self.make_table()
        self.version = 0
        self.started_at = dict[int, int]()
        self.trained: list[int] = []
        self.saved = self._save()
        self.admit()

    def make_table(self) -> NumberedTable:
        return NumberedTable(self.prompts, self.max_age, self.policy, window=0.3)

    def admit(self) -> None:
        for number in self.staleness.fill(self.version):
            self.started_at[number] = self.version

    def run(self, steps: int) -> None:
        while self.version < steps:
            self.go_on_until_a_step_is_complete()
            if self.random.random() < 0.1:
                self.resume()
                continue
            self.train()

    def go_on_until_a_step_is_complete(self) -> None:
        # Groups of the step that were taken in parts.
        self.ahead: list[int] = []
        chosen = self.staleness.select(self.version)
        while chosen is None:
            if self.parts and self.random.random() < 0.3:
                part = self.staleness.select_part(self.version)
                self.staleness.take(part, self.version)
                self.ahead += part
            running = self.staleness.list_in_state(SAMPLING)
            sampled = self.staleness.list_in_state(SAMPLED)
            assert running or sampled, "every group is complete and yet none can be trained: deadlock"
            self.let_something_happen(running, sampled)
            chosen = self.staleness.select(self.version)
        self.staleness.take(chosen, self.version)
        self.chosen = sorted([*self.ahead, *chosen])

    def let_something_happen(self, running: list[int], sampled: list[int]) -> None:
        luck = self.random.random()
        if running and luck < 0.1:
            self.restart(self.random.choice(running))
        elif luck < 0.2 and (overdue := self.staleness.overdue(self.version)):
            for number in overdue:
                self.staleness.resample(number, self.version)
                self.started_at[number] = self.version
        elif sampled and (luck < 0.6 or not running):
            self.staleness.ready(self.random.choice(sampled))
        else:
            # The long tail: the oldest finish last as often as not.
            pool = running if luck < 0.8 else running[len(running) // 2 :]
            self.staleness.mark_sampled(self.random.choice(pool))

    def restart(self, number: int) -> None:
        self.staleness.restart(number, self.version)
        self.started_at[number] = self.version

    def train(self) -> None:
        assert len(self.chosen) == self.prompts
        assert all(self.version - self.started_at[number] <= self.max_age for number in self.chosen)
        assert self.staleness.release() == self.chosen
        self.trained += self.chosen
        self.version += 1
        if self.random.random() < 0.5:
            self.saved = self._save()
        self.admit()
        active = sum(self.staleness.occupancy().values())
        assert active == self.staleness.rule.capacity == (self.max_age + 1) * self.prompts

    def resume(self) -> None:
        """Go back to the newest checkpoint, as after kill -9. Groups in flight are sampled again."""
        self.version, state, self.started_at, self.trained = self.saved
        self.saved = (self.version, state, dict(self.started_at), list(self.trained))
        number = len(self.trained) + len(state["groups"])
        self.staleness = self.make_table()
        self.staleness.next = number
        resampled = self.staleness.resume(state, self.version)
        assert not self.staleness.in_state(GroupState.DEFERRED)
        for number in resampled:
            self.started_at[number] = self.version
        self.admit()

    def _save(self) -> tuple[int, dict[str, Any], dict[int, int], list[int]]:
        return self.version, self.staleness.state_dict(), dict(self.started_at), list(self.trained)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from(POLICIES),
    st.integers(2, 25),
    st.booleans(),
)
def test_no_group_is_trained_too_old_or_twice_or_never(
    seed: int, prompts: int, max_age: int, policy: TrainingOrder, steps: int, parts: bool
) -> None:
    schedule = Schedule(seed, prompts, max_age, policy, parts)
    schedule.run(steps)
    assert len(schedule.trained) == len(set(schedule.trained)) == steps * prompts
    active = set(schedule.staleness.list_in_state(SAMPLING, SAMPLED, GroupState.READY))
    assert set(schedule.trained) | active == set(range(len(schedule.trained) + len(active)))
    assert not active & set(schedule.trained)


def test_age_zero_is_the_synchronous_loop() -> None:
    staleness = NumberedTable(4, 0, "windowed_fifo", 0.3)
    assert staleness.fill(0) == [0, 1, 2, 3]
    finish(staleness, 3, 1, 0)
    assert staleness.select(0) is None
    finish(staleness, 2)
    assert staleness.select(0) == [0, 1, 2, 3]


def test_a_straggler_is_passed_but_never_left_behind() -> None:
    staleness = NumberedTable(2, 2, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 1, 2, 3, 4, 5)
    assert staleness.select(0) == [1, 2]
    make_step(staleness, 0, [1, 2])
    # Within two steps' worth and the window of 2 + 2 groups from 0 on; then the step waits for this group.
    finish(staleness, 6, 7)
    assert staleness.select(1) is None
    assert staleness.waits_for() == "oldest"
    finish(staleness, 0)
    assert staleness.select(1) == [0, 3]


@pytest.mark.parametrize(("fraction", "expected_reached"), [(0.0, [1]), (0.3, [1, 3]), (1.0, [1, 3, 5])])
def test_the_window_is_a_steps_worth_and_a_share_of_all_groups(fraction: float, expected_reached: list[int]) -> None:
    config: Any = load("grpo", None, ["async.enabled=true", f"async.window_fraction={fraction}"]).config
    reached = []
    for newest in (1, 3, 5):
        staleness = NumberedTable(2, 2, "windowed_fifo", config.async_.window_fraction)
        assert staleness.fill(0) == [0, 1, 2, 3, 4, 5]
        finish(staleness, newest - 1, newest)
        if staleness.select(0) == [newest - 1, newest]:
            reached.append(newest)
    assert reached == expected_reached


def test_a_step_taken_in_parts_leaves_room_for_those_that_are_due() -> None:
    staleness = NumberedTable(3, 1, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 4)
    assert staleness.select(0) is None
    assert staleness.select_part(0) == [4]
    staleness.take([4], 0)
    finish(staleness, 1, 2)
    assert staleness.select(0) == [1, 2]
    make_step(staleness, 0, [1, 2])
    # 0, 3 and 5 are due now; groups of version 1 have to wait, complete or not.
    finish(staleness, 6, 7, 8, 3)
    assert staleness.select_part(1) == [3]
    staleness.take([3], 1)
    assert staleness.select_part(1) == []
    assert staleness.select(1) is None
    assert staleness.waits_for() == "oldest"
    finish(staleness, 0, 5)
    assert staleness.select(1) == [0, 5]


def test_in_order_waits_for_the_oldest() -> None:
    staleness = NumberedTable(2, 1, "in_order", 0.3)
    staleness.fill(0)
    finish(staleness, 1, 2, 3)
    assert staleness.select(0) is None
    finish(staleness, 0)
    assert staleness.select(0) == [0, 1]


def test_ready_first_takes_whoever_finished_first_while_all_deadlines_can_be_kept() -> None:
    staleness = NumberedTable(2, 2, "ready_first", 0.3)
    staleness.fill(0)
    finish(staleness, 5, 3)
    assert staleness.select(0) == [3, 5]
    make_step(staleness, 0, [3, 5])
    # Four groups of version 0 are left for two steps: at most none of version 1 may pass them now.
    finish(staleness, 6, 7)
    assert staleness.select(1) is None
    finish(staleness, 4, 0)
    assert staleness.select(1) == [0, 4]


def test_an_overdue_group_is_drawn_anew_once() -> None:
    staleness = NumberedTable(2, 1, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 1, 2)
    make_step(staleness, 0, [1, 2])
    finish(staleness, 3, 4, 5)
    assert staleness.overdue(1) == [0]
    staleness.resample(0, 1)
    assert staleness.select(1) == [3, 4]
    make_step(staleness, 1, [3, 4])
    finish(staleness, 6, 7)
    assert staleness.select(2) is None
    assert staleness.overdue(2) == []


def test_a_group_older_than_the_bound_is_refused() -> None:
    staleness = NumberedTable(1, 1, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 0)
    with pytest.raises(RuntimeError, match="older than 1 steps"):
        staleness.take([0], 2)


def test_more_than_the_capacity_is_refused() -> None:
    staleness = NumberedTable(2, 1, "windowed_fifo", 0.3)
    with pytest.raises(ValueError, match="5 groups do not fit beside 0 of at most 4"):
        staleness.admit([0, 1, 2, 3, 4], 0)


def test_a_resume_keeps_what_was_ready_and_samples_the_rest_anew() -> None:
    staleness = NumberedTable(2, 1, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 2)
    staleness.mark_sampled(1)
    state = staleness.state_dict()
    resumed = NumberedTable(2, 1, "windowed_fifo", 0.3)
    assert resumed.resume(state, 1) == [0, 1, 3]
    assert resumed.occupancy() == {0: 1, 1: 3}
    assert resumed.list_in_state(GroupState.READY) == [2]
    assert resumed.room == 0


def test_a_group_that_has_rollouts_keeps_its_age_when_the_others_begin_again() -> None:
    staleness = NumberedTable(1, 2, "windowed_fifo", 0.3)
    staleness.fill(0)
    some: Any = object()
    staleness[0].rollouts[3] = some
    staleness.restart(0, 1)
    staleness.restart(1, 1)
    assert staleness.occupancy() == {0: 2, 1: 1}
    # A resampled group loses its rollouts and its age.
    assert staleness.resample(0, 1).rollouts == {}
    assert staleness.occupancy() == {0: 1, 1: 2}


def test_a_dropped_group_takes_its_place_in_a_step_with_no_rollouts() -> None:
    staleness = NumberedTable(2, 0, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 1)
    staleness.drop(0)
    assert staleness.select(0) == [0, 1]
    assert staleness[0].rollouts == {}


def test_a_group_goes_through_its_states_in_order() -> None:
    staleness = NumberedTable(1, 1, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, 0)
    moves = {
        "sampling": lambda: staleness.restart(0, 1),
        "sampled": lambda: staleness.mark_sampled(0),
        "ready": lambda: staleness.mark_scored(0, None),
    }
    for late, move in moves.items():
        with pytest.raises(RuntimeError, match=f"group 0 is ready, which {late} cannot follow"):
            move()
    with pytest.raises(RuntimeError, match="group 1 is sampling, which taken cannot follow"):
        staleness.take([1], 0)


def test_a_resume_under_a_smaller_bound_keeps_it_and_loses_nobody() -> None:
    staleness = NumberedTable(2, 3, "windowed_fifo", 0.3)
    staleness.fill(0)
    finish(staleness, *range(8))
    resumed = NumberedTable(2, 1, "windowed_fifo", 0.3)
    assert resumed.resume(staleness.state_dict(), 1) == [2, 3]
    assert resumed.list_in_state(GroupState.READY) == [0, 1]
    assert resumed.list_in_state(GroupState.DEFERRED) == [4, 5, 6, 7]
    assert resumed.select(1) == [0, 1]
    # Saved once more they wait on, and are admitted first.
    third = NumberedTable(2, 1, "windowed_fifo", 0.3)
    third.resume(resumed.state_dict(), 1)
    assert third.list_in_state(GroupState.DEFERRED) == [4, 5, 6, 7]
    third.take([0, 1], 1)
    third.release()
    assert third.room == 2
    third.admit({number: make_task(number) for number in (4, 5)}, 2)
    assert third.list_in_state(SAMPLING) == [2, 3, 4, 5]
