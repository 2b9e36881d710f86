"""States of the groups of a training run, from the draw of their task to the end of their step (contracts 1 and 2).

    load -> DEFERRED -- admit --+
                                v                                        trained or filtered
            draw -- admit --> SAMPLING -- last rollout --> SAMPLED -- scored --> READY -- take --> TAKEN -- release -->
                              ^  |  |                         |                    ^                 ^
          engine lost, resume |  |  +----- dropped: failed too often, no rollout --+                 | no budget left
          or resample (due) --+--+                            +-- scored, teaches nothing --> FILTERED -- release -->

DEFERRED: drawn, but a resume found no room, as after a change of N or S; or a synchronous step did not need it, in
whichever state it was (`put_off`). SAMPLING: its rollouts are in an engine or wait for one. SAMPLED: every rollout is
there. READY: every rollout is scored; a dropped group has none. FILTERED: scored, but it teaches nothing, and another
group is sampled in its place. TAKEN: in the current step. A group leaves by `release` alone, so none is lost, and with
its number, so none is trained twice. Validation and the parity check have no groups here.

Worked example: N = 2 groups a step, S = 1 (`max_trajectory_age_steps`), hence at most 4 groups.

    admit 0 1 2 3 at version 0                        all SAMPLING, to be trained at version 1 or before
    1, 2 sampled and scored    select(0) -> [1, 2]    0 is late: it may still train at version 1
    take 1 2, release; admit 4 5 at version 1
    3 4 5 sampled and scored   select(1) -> None      0 and 3 are due at version 1 and fill the step: wait for 0
                               overdue(1) -> [0]      ... or resample it at version 1, then select(1) -> [3, 4]

No clock, no processes, no lock. The states of groups are counted as they change, so that no event looks at all groups.
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
    """State of a group, see the head of this file."""

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
# States of groups that have no place on the way to a step.
_ASIDE = (GroupState.DEFERRED, GroupState.FILTERED)
# States of groups that the current step may still take.
_NOT_TAKEN = (GroupState.SAMPLING, GroupState.SAMPLED, GroupState.READY, GroupState.FILTERED)
# Fields of a record in a checkpoint.
_SAVED_FIELDS = ("number", "version", "place", "finished", "attempt", "failures", "reason")


@dataclass
class GroupRecord:
    """One group of the run."""

    # Number of its task's draw.
    number: int
    task: Task
    # Weight version at which its oldest rollout began; no token is older.
    version: int
    # Place in the order of training; a group that is resampled goes to the end.
    place: int
    state: GroupState = GroupState.SAMPLING
    # Place in the order in which groups were sampled.
    finished: int = 0
    # Number of times it was resampled on purpose.
    attempt: int = 0
    # Number of engines lost while they sampled it.
    failures: int = 0
    # Reason for which it is FILTERED.
    reason: str = ""
    # When it was admitted or last restarted, seconds of the buffer's clock.
    began: float = 0.0
    # Rollouts that are there, by index.
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the rollouts that are there."""
        return sum(rollout.num_tokens for rollout in self.rollouts.values())

    def rollout_group(self) -> RolloutGroup:
        """Return the rollouts that are there, as a group."""
        return RolloutGroup(self.task, list(self.rollouts.values()))


class GroupTable:
    """Groups of a run by number, in the order of their places. Raises KeyError for a number that it lacks.

    budget: number of groups that teach nothing and are replaced for each step.
    """

    def __init__(self, rule: StalenessRule, budget: int = 0) -> None:
        self.rule = rule
        self._budget = budget
        # Groups that an asynchronous run may still replace: it has max_age steps' worth in flight besides a step's own.
        self._max_credit = (rule.max_age + 1) * budget
        self._credit = self._max_credit
        self._groups: dict[int, GroupRecord] = {}
        self._by_state: dict[GroupState, dict[int, GroupRecord]] = {state: {} for state in GroupState}
        # Tokens of READY groups.
        self.ready_tokens = 0
        # Number of places given in the order of training.
        self._placed = 0
        # Number of groups that were sampled.
        self._sampled = 0

    def __getitem__(self, number: int) -> GroupRecord:
        return self._groups[number]

    def get(self, number: int) -> GroupRecord | None:
        """Return a group; None if the number is not active."""
        return self._groups.get(number)

    @property
    def active(self) -> int:
        """Number of groups between admission and release, without those that are FILTERED."""
        return len(self._groups) - self.count(*_ASIDE)

    @property
    def room(self) -> int:
        """Number of groups that may be admitted.

        A synchronous step may have as many as it may replace beyond its own: it puts off those that it does not need.
        """
        surplus = 0 if self.rule.max_age else self._budget - self.count(GroupState.FILTERED)
        return self.rule.capacity + surplus - self.active

    @property
    def places(self) -> int:
        """Free places of the current step."""
        return self.rule.groups_per_step - self.count(GroupState.TAKEN)

    def in_state(self, *states: GroupState) -> list[GroupRecord]:
        """Return the groups in any of these states, oldest first."""
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
        """Return the cause of the next step's wait, and the number of groups by state and version, for a human."""
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
        """Begin new or deferred groups, by number, while the generator serves `version`. Raises ValueError if they do
        not fit."""
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
        """Note that every rollout of a group is there."""
        group = self._groups[number]
        self._move(group, GroupState.SAMPLED)
        group.finished = self._sampled
        self._sampled += 1

    def mark_scored(self, number: int, reason: str | None) -> None:
        """Note that every rollout of a group is scored. reason: why the group teaches nothing; None if it teaches.

        A group that teaches nothing is FILTERED while the budget lasts. In a synchronous run `select` counts the
        budget, in the order of the draws.
        """
        group = self._groups[number]
        is_filtered = bool(reason) and self._credit > 0
        self._move(group, GroupState.FILTERED if is_filtered else GroupState.READY)
        group.reason = reason or ""
        if is_filtered and self.rule.max_age:
            self._credit -= 1
            # The places close up: else the window of `windowed_fifo` would hold fewer groups than a step needs.
            for other in self._list_waiting():
                if other.place > group.place:
                    other.place -= 1
            self._placed -= 1

    def drop(self, number: int) -> None:
        """Make a group that is being sampled READY with no rollouts: its step counts it as dropped."""
        group = self._groups[number]
        group.rollouts = {}
        self._move(group, GroupState.READY)
        group.finished = self._sampled
        self._sampled += 1

    def restart(self, number: int, version: int) -> None:
        """Note that missing rollouts begin again at `version`. Rollouts that are there stay, and so does the
        group's age."""
        group = self._groups[number]
        self._move(group, GroupState.SAMPLING)
        if not group.rollouts:
            group.version = max(group.version, version)

    def resample(self, number: int, version: int) -> GroupRecord:
        """Begin all rollouts of a group again at `version`, once: `overdue` names it no more."""
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
        """Return the numbers of the groups for the places left in the step at `version`, oldest first; None while some
        have to be waited for."""
        # Cheaper than the choice, which would run after every finished group.
        if self.count(GroupState.READY, GroupState.FILTERED) < self.places:
            return None
        chosen = self.select_part(version)
        return chosen if len(chosen) == self.places else None

    def select_part(self, version: int) -> list[int]:
        """Return the numbers of groups that may train at `version`, independent of the others' fate, oldest first:
        fewer than the step has places left, if some have to be waited for."""
        if not self.rule.max_age:
            return self._select_first_drawn()
        waiting = self._list_waiting()
        chosen = self.rule.choose(waiting, lambda group: group.state is GroupState.READY, version, self.places)
        return sorted(group.number for group in chosen)

    def _select_first_drawn(self) -> list[int]:
        """Return the groups of a synchronous step in the order of their draws, up to the first that is not scored.

        FILTERED ones are passed over while the budget lasts, and then take places. So the choice depends on the draws
        alone, not on who ended first.
        """
        chosen: list[int] = []
        replaced = 0
        for group in self.in_state(*_NOT_TAKEN):
            if group.state not in (GroupState.READY, GroupState.FILTERED) or len(chosen) == self.places:
                break
            # A resume has the rollouts of no FILTERED group.
            if group.state is GroupState.FILTERED and (replaced < self._budget or not group.rollouts):
                replaced += 1
            else:
                chosen.append(group.number)
        return chosen

    def surplus(self) -> list[GroupRecord]:
        """Return the groups that a synchronous step did not need: it is full, and they were drawn later."""
        if self.rule.max_age or self.places:
            return []
        last = max(group.number for group in self.in_state(GroupState.TAKEN))
        return [group for group in self.in_state(*_NOT_TAKEN) if group.number > last]

    def put_off(self, groups: list[GroupRecord]) -> None:
        """Defer groups to the next step, with its weights and the same seeds."""
        for group in groups:
            self._move(group, GroupState.DEFERRED)
            group.rollouts = {}
            group.reason = ""

    def take(self, numbers: list[int], version: int) -> list[GroupRecord]:
        """Put groups into the step that trains at `version`. Raises RuntimeError rather than break the bound."""
        groups = [self._groups[number] for number in numbers]
        if stale := [group.number for group in groups if version > self.rule.deadline(group)]:
            raise RuntimeError(f"groups {stale} are older than {self.rule.max_age} steps at version {version}")
        for group in groups:
            self._move(group, GroupState.TAKEN)
        return groups

    def release(self) -> list[int]:
        """Remove the groups of the ended step, and FILTERED ones; return their numbers."""
        released = [group.number for group in self.in_state(GroupState.TAKEN, GroupState.FILTERED)]
        for number in released:
            self._remove_group(number)
        self._credit = min(self._max_credit, self._credit + self._budget)
        return released

    def overdue(self, version: int) -> list[int]:
        """Return the numbers of groups that the step at `version` waits for although it could do without them.

        Resampled they need not train now. Empty while complete groups are too few anyway, and for groups that were
        resampled before.
        """
        waiting = self._list_waiting()
        sampling = [group for group in waiting if group.state is GroupState.SAMPLING]
        due = [group for group in sampling if self.rule.deadline(group) == version]
        num_complete = len(waiting) - len(sampling)
        if self.rule.max_age == 0 or num_complete < self.places or any(group.attempt for group in due):
            return []
        return [group.number for group in due]

    def waits_for(self) -> Literal["rollouts", "scores", "oldest"]:
        """Return the reason why the next step cannot start: too few groups are sampled, or scored, or older ones come
        first."""
        if self.count(GroupState.READY, GroupState.SAMPLED) < self.places:
            return "rollouts"
        return "scores" if self.count(GroupState.READY) < self.places else "oldest"

    def state_dict(self) -> dict[str, Any]:
        """Return every group for a checkpoint between two steps, but for tasks and rollouts."""
        groups = []
        for group in self._groups.values():
            fields = {name: getattr(group, name) for name in _SAVED_FIELDS}
            groups.append({**fields, "state": group.state.value})
        return {"placed": self._placed, "credit": self._credit, "groups": groups}

    def load_state_dict(
        self,
        state: dict[str, Any],
        version: int,
        task: Callable[[int], Task],
        rollouts: Mapping[int, list[Rollout]],
    ) -> list[GroupRecord]:
        """Take up the state of `state_dict`. task: gives a draw's task; rollouts: of groups that were READY.

        READY groups stay so where their deadlines can be kept. Returns the others, to be sampled again at `version`.
        Groups without room are DEFERRED.
        """
        self._placed = state["placed"]
        self._sampled = len(state["groups"])
        self._credit = min(self._max_credit, state.get("credit", self._max_credit))
        resampled = []
        for saved in state["groups"]:
            # A checkpoint of an earlier release may lack fields.
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
        """Change a group's state. Raises RuntimeError for a transition that the drawing lacks."""
        if state not in _NEXT[group.state]:
            raise RuntimeError(f"group {group.number} is {group.state.value}, which {state.value} cannot follow")
        self._by_state[group.state].pop(group.number)
        self.ready_tokens -= group.num_tokens if group.state is GroupState.READY else 0
        group.state = state
        self._by_state[state][group.number] = group
        self.ready_tokens += group.num_tokens if state is GroupState.READY else 0

    def _list_waiting(self) -> list[GroupRecord]:
        """Return the groups on their way to a step that no step has taken yet."""
        return [group for group in self._groups.values() if group.state not in (GroupState.TAKEN, *_ASIDE)]

    def _next_place(self) -> int:
        self._placed += 1
        return self._placed - 1
