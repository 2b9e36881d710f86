"""States of the groups of a training run, from the draw of their task to the end of their step (contracts 1 and 2).

    load -> DEFERRED -- admit --+
                                v                                        trained or filtered
            draw -- admit --> SAMPLING -- last rollout --> SAMPLED -- scored --> READY -- take --> TAKEN -- release -->
                              ^  |  |                         |                    ^                 ^
          engine lost, resume |  |  +----- dropped: failed too often, no rollout --+                 | no budget left
          or resample (due) --+--+                            +-- scored, teaches nothing --> FILTERED -- release -->

DEFERRED: drawn, but sampled later, because a resume found no room (for example after a change of N or S), or because a
synchronous step did not need the group (`put_off`). SAMPLING: its rollouts are in an engine or wait for one. SAMPLED:
every rollout has ended. READY: every rollout is scored; a dropped group has no rollouts. FILTERED: scored, but it
teaches nothing, and another group is sampled in its place. TAKEN: in the current step. Only `release` removes a group,
so none is lost. A removed group's number is unknown afterwards, so no group is trained twice. Groups of validation and
the parity check are not in the table.

Worked example: N = 2 groups a step, S = 1 (`max_trajectory_age_steps`), hence at most 4 groups.

    admit 0 1 2 3 at version 0                        all SAMPLING, to be trained at version 1 or before
    1, 2 sampled and scored    select(0) -> [1, 2]    0 is late: it may still train at version 1
    take 1 2, release; admit 4 5 at version 1
    3 4 5 sampled and scored   select(1) -> None      0 and 3 are due at version 1 and fill the step: wait for 0
                               overdue(1) -> [0]      ... or resample it at version 1, then select(1) -> [3, 4]

This module has no clock, processes or locks. Groups are indexed by state, so that an event need not look at all groups.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from rlctl.data.tasks import Task
from rlctl.rollout.staleness import StalenessRule
from rlctl.rollout.types import Rollout, RolloutGroup


class GroupState(Enum):
    """State of a group; the docstring of this module explains each."""

    DEFERRED = "deferred"
    SAMPLING = "sampling"
    SAMPLED = "sampled"
    READY = "ready"
    FILTERED = "filtered"
    TAKEN = "taken"


_NEXT = {
    GroupState.DEFERRED: {GroupState.SAMPLING},
    GroupState.SAMPLING: {GroupState.SAMPLING, GroupState.SAMPLED, GroupState.READY, GroupState.DEFERRED},
    GroupState.SAMPLED: {GroupState.READY, GroupState.FILTERED, GroupState.DEFERRED},
    GroupState.READY: {GroupState.TAKEN, GroupState.DEFERRED},
    GroupState.FILTERED: {GroupState.TAKEN, GroupState.DEFERRED},
    GroupState.TAKEN: set[GroupState](),
}
# States of groups that are not in the order of training.
_ASIDE = (GroupState.DEFERRED, GroupState.FILTERED)
# States of groups that the current step may still take.
_NOT_TAKEN = (GroupState.SAMPLING, GroupState.SAMPLED, GroupState.READY, GroupState.FILTERED)
# Fields of `GroupRecord` that a checkpoint holds.
_SAVED_FIELDS = ("number", "version", "place", "finished", "attempt", "failures", "reason")


@dataclass
class GroupRecord:
    """One group of the run."""

    # Number of the draw of its task, which is the data cursor's position. It identifies the group.
    number: int
    task: Task
    # Weight version at which its oldest rollout began. No token of the group is older.
    version: int
    # Place in the order of training. Resampling a group gives it the last place.
    place: int
    state: GroupState = GroupState.SAMPLING
    # Place in the order in which groups became SAMPLED.
    finished: int = 0
    # Number of times `resample` began the group again.
    attempt: int = 0
    # Number of engines lost while they sampled the group.
    failures: int = 0
    # Reason why the group teaches nothing; empty if it teaches.
    reason: str = ""
    # Time at which its rollouts were begun, seconds of the event loop's clock.
    began: float = 0.0
    # True if the group is SAMPLED and its scores are being computed.
    is_in_scoring: bool = False
    # Rollouts that have ended, by their index in the group.
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the rollouts that have ended."""
        return sum(rollout.num_tokens for rollout in self.rollouts.values())

    @property
    def must_be_resampled(self) -> bool:
        """True if a resumed run samples the group again, though it is READY: a reward asked the run to stop."""
        return bool(self.rollout_group().stop)

    def rollout_group(self) -> RolloutGroup:
        """Return the rollouts that have ended, as a group."""
        return RolloutGroup(self.task, list(self.rollouts.values()))


class GroupTable:
    """Groups of a run by number, in the order of their places. Methods raise KeyError for an unknown number.

    budget: the most groups that one step may replace because they teach nothing.
    """

    def __init__(self, rule: StalenessRule, budget: int = 0) -> None:
        self.rule = rule
        self._budget = budget
        # Number of groups that an asynchronous run may still replace. The groups of max_age + 1 steps are in flight,
        # so it begins with the budgets of this number of steps.
        self._max_credit = (rule.max_age + 1) * budget
        self._credit = self._max_credit
        self._groups: dict[int, GroupRecord] = {}
        self._by_state: dict[GroupState, dict[int, GroupRecord]] = {state: {} for state in GroupState}
        # Number of tokens of all READY groups.
        self.ready_tokens = 0
        # Next free place in the order of training.
        self._free_place = 0
        # Number of groups that have become SAMPLED or were dropped: next value of `GroupRecord.finished`.
        self._num_finished = 0

    def __getitem__(self, number: int) -> GroupRecord:
        return self._groups[number]

    def get(self, number: int) -> GroupRecord | None:
        """Return a group; None if the table has none of this number."""
        return self._groups.get(number)

    @property
    def active(self) -> int:
        """Number of groups between admission and release, without FILTERED ones."""
        return len(self._groups) - self.count(*_ASIDE)

    @property
    def room(self) -> int:
        """Number of further groups that may be admitted.

        A synchronous step may begin up to `budget` groups more than it trains. It defers those that it does not need.
        """
        surplus = 0 if self.rule.max_age else self._budget - self.count(GroupState.FILTERED)
        return self.rule.capacity + surplus - self.active

    @property
    def num_lacking(self) -> int:
        """Number of groups that the current step still lacks."""
        return self.rule.groups_per_step - self.count(GroupState.TAKEN)

    def in_state(self, *states: GroupState) -> list[GroupRecord]:
        """Return the groups in any of these states, in the order of their draws."""
        groups: list[GroupRecord] = []
        for state in states:
            groups += self._by_state[state].values()
        return sorted(groups, key=lambda group: group.number)

    def count(self, *states: GroupState) -> int:
        """Return the number of groups in any of these states."""
        return sum(len(self._by_state[state]) for state in states)

    def occupancy(self) -> dict[int, int]:
        """Return the number of active groups by the version at which they were admitted."""
        groups = [group for group in self._groups.values() if group.state not in _ASIDE]
        return dict(sorted(Counter(group.version for group in groups).items()))

    def describe(self, now: float) -> str:
        """Return a text on the cause of the step's wait, and on the number of groups by state and by version."""
        text: str = self.waits_for()
        sampling = self.in_state(GroupState.SAMPLING)
        if sampling:
            oldest = min(sampling, key=lambda group: group.began)
            text += f"; the oldest, prompt {oldest.task.id}, began {now - oldest.began:.0f} s ago"
        text += f"; {len(sampling)} groups sampling, {self.count(GroupState.SAMPLED)} to score"
        text += f", {self.count(GroupState.READY)} ready"
        if self.count(GroupState.FILTERED):
            text += f", {self.count(GroupState.FILTERED)} filtered"
        versions = ", ".join(f"{count} of version {version}" for version, count in self.occupancy().items())
        return f"{text}, {self.count(GroupState.TAKEN)} taken for the step ({versions})"

    def admit(self, tasks: Mapping[int, Task], version: int) -> list[GroupRecord]:
        """Begin new or DEFERRED groups, while the generator serves `version`. tasks: group number -> task. Raises
        ValueError if the groups do not fit."""
        if len(tasks) > self.room:
            limit = self.active + self.room
            raise ValueError(f"{len(tasks)} groups do not fit beside {self.active} of at most {limit}")
        for number, task in tasks.items():
            if deferred := self._groups.get(number):
                self._move(deferred, GroupState.SAMPLING)
                self._remove_group(number)
            self._add_group(GroupRecord(number, task, version, self._next_place()))
        return [self._groups[number] for number in tasks]

    def mark_sampled(self, number: int) -> None:
        """Note that every rollout of a group has ended."""
        group = self._groups[number]
        self._move(group, GroupState.SAMPLED)
        group.finished = self._num_finished
        self._num_finished += 1

    def begin_scoring(self) -> list[GroupRecord]:
        """Return the SAMPLED groups whose scores are not being computed, and note that they are from now on."""
        groups = [group for group in self.in_state(GroupState.SAMPLED) if not group.is_in_scoring]
        for group in groups:
            group.is_in_scoring = True
        return groups

    def mark_scored(self, number: int, reason: str | None) -> None:
        """Note that every rollout of a group is scored. reason: why the group teaches nothing; None if it teaches.

        A group that teaches nothing becomes FILTERED while the budget lasts, READY afterwards. In a synchronous run
        the budget is not spent here: `select` spends it in the order of the draws.
        """
        group = self._groups[number]
        is_filtered = bool(reason) and self._credit > 0
        self._move(group, GroupState.FILTERED if is_filtered else GroupState.READY)
        group.reason = reason or ""
        if is_filtered and self.rule.max_age:
            self._credit -= 1
            # Later groups move up by one place. Otherwise there would be too few groups in the window of
            # `windowed_fifo`.
            for other in self._list_waiting():
                if other.place > group.place:
                    other.place -= 1
            self._free_place -= 1

    def drop(self, number: int) -> None:
        """Make a SAMPLING group READY without rollouts. The step that takes the group counts it as dropped."""
        group = self._groups[number]
        group.rollouts = {}
        self._move(group, GroupState.READY)
        group.finished = self._num_finished
        self._num_finished += 1

    def restart(self, number: int, version: int) -> None:
        """Note that a group's missing rollouts begin again at `version`. If any rollout has ended, it stays, and the
        group keeps its older version."""
        group = self._groups[number]
        self._move(group, GroupState.SAMPLING)
        if not group.rollouts:
            group.version = max(group.version, version)

    def resample(self, number: int, version: int) -> GroupRecord:
        """Begin all rollouts of a group again at `version`. A group is resampled once: `overdue` then skips it."""
        group = self._groups[number]
        self._move(group, GroupState.SAMPLING)
        self._remove_group(number)
        group.rollouts = {}
        group.attempt += 1
        group.version = version
        group.place = self._next_place()
        self._add_group(group)
        return group

    def select(self, version: int) -> list[int] | None:
        """Return the numbers of all groups that the step at `version` still lacks, in the order of their draws; None
        if the step must wait for groups."""
        # Cheaper than `select_part`, which would run after every finished group.
        if self.count(GroupState.READY, GroupState.FILTERED) < self.num_lacking:
            return None
        chosen = self.select_part(version)
        return chosen if len(chosen) == self.num_lacking else None

    def select_part(self, version: int) -> list[int]:
        """Return the numbers of complete groups that may train at `version` independently of unfinished groups, in the
        order of their draws. They are fewer than `num_lacking` if the step must wait for further groups."""
        if not self.rule.max_age:
            return self._select_first_drawn()
        waiting = self._list_waiting()
        chosen = self.rule.choose(waiting, lambda group: group.state is GroupState.READY, version, self.num_lacking)
        return sorted(group.number for group in chosen)

    def _select_first_drawn(self) -> list[int]:
        """Return the groups of a synchronous step in the order of their draws, up to the first that is not scored.

        FILTERED groups are skipped while the budget lasts, and take places afterwards. So the choice depends on the
        order of the draws, not on which group ended first.
        """
        chosen: list[int] = []
        num_replaced = 0
        for group in self.in_state(*_NOT_TAKEN):
            if group.state not in (GroupState.READY, GroupState.FILTERED) or len(chosen) == self.num_lacking:
                break
            # After a resume a FILTERED group has no rollouts, since a checkpoint saves only those of READY groups.
            if group.state is GroupState.FILTERED and (num_replaced < self._budget or not group.rollouts):
                num_replaced += 1
            else:
                chosen.append(group.number)
        return chosen

    def surplus(self) -> list[GroupRecord]:
        """Return the groups that a full synchronous step does not need: those drawn after the last group it took."""
        if self.rule.max_age or self.num_lacking:
            return []
        last = max(group.number for group in self.in_state(GroupState.TAKEN))
        return [group for group in self.in_state(*_NOT_TAKEN) if group.number > last]

    def put_off(self, groups: list[GroupRecord]) -> None:
        """Defer groups: the next step samples them again, with the weights of that step and the same seeds."""
        for group in groups:
            self._move(group, GroupState.DEFERRED)
            group.rollouts = {}
            group.reason = ""

    def take(self, numbers: list[int], version: int) -> list[GroupRecord]:
        """Put groups into the step that trains at `version`. Raises RuntimeError if one exceeds the bound on age."""
        groups = [self._groups[number] for number in numbers]
        if stale := [group.number for group in groups if version > self.rule.deadline(group)]:
            raise RuntimeError(f"groups {stale} are older than {self.rule.max_age} steps at version {version}")
        for group in groups:
            self._move(group, GroupState.TAKEN)
        return groups

    def release(self) -> list[int]:
        """Remove the TAKEN groups of the ended step and all FILTERED groups; return their numbers."""
        released = [group.number for group in self.in_state(GroupState.TAKEN, GroupState.FILTERED)]
        for number in released:
            self._remove_group(number)
        self._credit = min(self._max_credit, self._credit + self._budget)
        return released

    def overdue(self, version: int) -> list[int]:
        """Return the numbers of SAMPLING groups for which the step at `version` must wait only because they are due.

        If they are resampled, the step can train other groups. Return [] if too few other groups are complete, or if a
        due group was resampled before.
        """
        waiting = self._list_waiting()
        sampling = [group for group in waiting if group.state is GroupState.SAMPLING]
        due = [group for group in sampling if self.rule.deadline(group) == version]
        num_complete = len(waiting) - len(sampling)
        if self.rule.max_age == 0 or num_complete < self.num_lacking or any(group.attempt for group in due):
            return []
        return [group.number for group in due]

    def waits_for(self) -> Literal["rollouts", "scores", "oldest"]:
        """Return why the next step waits. rollouts: too few groups are sampled. scores: too few are scored. oldest:
        older groups must train first."""
        if self.count(GroupState.READY, GroupState.SAMPLED) < self.num_lacking:
            return "rollouts"
        return "scores" if self.count(GroupState.READY) < self.num_lacking else "oldest"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every group for a checkpoint between two steps, without tasks and rollouts."""
        groups = []
        for group in self._groups.values():
            fields = {name: getattr(group, name) for name in _SAVED_FIELDS}
            state = GroupState.SAMPLED if group.must_be_resampled else group.state
            groups.append({**fields, "state": state.value})
        return {"placed": self._free_place, "credit": self._credit, "groups": groups}

    def saved_rollouts(self) -> dict[int, list[Rollout]]:
        """Return the rollouts of READY groups that a checkpoint keeps, by the group's number."""
        kept = [group for group in self.in_state(GroupState.READY) if not group.must_be_resampled]
        return {group.number: list(group.rollouts.values()) for group in kept}

    def load_state_dict(
        self,
        state: dict[str, Any],
        version: int,
        task: Callable[[int], Task],
        rollouts: Mapping[int, list[Rollout]],
    ) -> list[GroupRecord]:
        """Restore the state of `state_dict`. task: returns the task of a group number. rollouts: of READY groups.

        A READY group stays READY if all deadlines can be kept. Returns the other groups, for the caller to sample again
        at `version`. Groups without room become DEFERRED.
        """
        self._free_place = state["placed"]
        self._num_finished = len(state["groups"])
        self._credit = min(self._max_credit, state.get("credit", self._max_credit))
        resampled = []
        for saved in state["groups"]:
            # A checkpoint of an earlier release may lack some fields.
            fields = {name: saved[name] for name in _SAVED_FIELDS if name in saved}
            saved_state = GroupState(saved["state"])
            group = GroupRecord(task=task(saved["number"]), **fields)
            if saved_state in _ASIDE:
                group.state = saved_state
            elif not self.room:
                group.state = GroupState.DEFERRED
            self._add_group(group)
            if group.state in _ASIDE:
                continue
            # The table has the group as SAMPLING now, so that the check below includes its deadline.
            if saved_state is GroupState.READY and self.rule.is_feasible(self._list_waiting(), version):
                self._remove_group(group.number)
                group.state = GroupState.READY
                group.rollouts = dict(enumerate(rollouts[group.number]))
                self._add_group(group)
            else:
                self.restart(group.number, version)
                resampled.append(group)
        return resampled

    def _add_group(self, group: GroupRecord) -> None:
        self._groups[group.number] = group
        self._by_state[group.state][group.number] = group
        self.ready_tokens += group.num_tokens if group.state is GroupState.READY else 0

    def _remove_group(self, number: int) -> None:
        group = self._groups.pop(number)
        del self._by_state[group.state][number]
        self.ready_tokens -= group.num_tokens if group.state is GroupState.READY else 0

    def _move(self, group: GroupRecord, state: GroupState) -> None:
        """Change a group's state. Raises RuntimeError for a transition that `_NEXT` lacks."""
        if state not in _NEXT[group.state]:
            raise RuntimeError(f"group {group.number} is {group.state.value}, which {state.value} cannot follow")
        self._by_state[group.state].pop(group.number)
        self.ready_tokens -= group.num_tokens if group.state is GroupState.READY else 0
        group.state = state
        self._by_state[state][group.number] = group
        self.ready_tokens += group.num_tokens if state is GroupState.READY else 0

    def _list_waiting(self) -> list[GroupRecord]:
        """Return the SAMPLING, SAMPLED and READY groups, which no step has taken yet."""
        return [group for group in self._groups.values() if group.state not in (GroupState.TAKEN, *_ASIDE)]

    def _next_place(self) -> int:
        self._free_place += 1
        return self._free_place - 1
