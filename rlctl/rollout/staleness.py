"""Which groups may be sampled, and which are trained next: the bound on staleness as a pure state machine.

Contract 1: a group trains at version v only if its age, v minus the oldest version among its tokens, is at most
`max_age` (`max_trajectory_age_steps`). Contract 2: a group admitted leaves by `release` alone, so none is lost.

Symbols: N groups a step, S = max_age. A group admitted while the generator serves version g holds no older token, so it
keeps the bound if it trains at version g + S or before: its deadline. At most C = (S + 1) N groups are anywhere between
admission and the end of their step, hence (with F(d) the groups with a deadline of at most d, v the version to train)

    F(d) <= (d - v + 1) N   for every d >= v                                                            (feasible)

at the start; and `select` never takes a group with a later deadline where F(d) is tight. A step then removes N groups
from every tight F(d) while v grows by one, and groups admitted afterwards have deadline v + S, where F is at most C: so
the line holds again. At most N groups are ever due at once, all of them fit into the step, and none is born stale.

A step may be taken in parts, before all of its groups are there: `select_part` chooses like `select`, place by place,
as far as it goes, and the line holds with the places that are left in place of N. What comes first is taken first then:
a group that the policy would have preferred, had it been there, may train a step later.

No policy deadlocks: what `select` waits for is being sampled already (every active group is), the version does not move
while it waits, and sampling never waits for the trainer. For `in_order` that is the oldest group. For `windowed_fifo`
the oldest always lies in its own window, so once it is complete the window moves on. `ready_first` waits only for due
groups, or for N complete ones, of which C >= N are on their way.

No clock, no processes: callers say what happened.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import ceil
from typing import Any, Literal

Policy = Literal["windowed_fifo", "in_order", "ready_first"]
Status = Literal["running", "sampled", "ready", "taken"]
_DONE: dict[bool, tuple[Status, ...]] = {True: ("ready",), False: ("ready", "sampled")}


@dataclass
class GroupSlot:
    """One active group. ordinal: its name, the number of the draw. version: no token of it is older.

    place: in the order of training; a group drawn anew goes to its end. finished: in the order in which groups were
    sampled. failures: samplings lost with an engine.
    """

    group_id: int
    version: int
    place: int
    status: Status = "running"
    finished: int = 0
    redrawn: bool = False
    failures: int = 0


class StalenessScheduler:
    """The active groups of a run, by ordinal. Every method that changes one raises KeyError for a group unknown."""

    def __init__(self, num_prompts_per_step: int, max_age: int, policy: Policy, window_fraction: float) -> None:
        self._step, self._max_age, self._policy = num_prompts_per_step, max_age, policy
        self.capacity = (max_age + 1) * num_prompts_per_step
        # A step's worth must fit into the window, or nothing could be trained while the oldest is running.
        self._window = num_prompts_per_step + ceil(window_fraction * self.capacity)
        self._slots: dict[int, GroupSlot] = {}
        self._placed = self._sampled = 0

    def room(self) -> int:
        """Groups that may be admitted now."""
        return self.capacity - len(self._slots)

    def admit(self, group_ids: list[int], version: int) -> None:
        """New groups; `version` is the one that the generator serves. Raises ValueError if they do not fit."""
        if len(group_ids) > self.room():
            raise ValueError(f"{len(group_ids)} groups do not fit beside {len(self._slots)} of at most {self.capacity}")
        for group_id in group_ids:
            self._slots[group_id] = GroupSlot(group_id, version, self._next_place())

    def sampled(self, group_id: int) -> None:
        """Every rollout of the group is there; it is not scored yet."""
        self._slots[group_id].status, self._slots[group_id].finished = "sampled", self._sampled
        self._sampled += 1

    def ready(self, group_id: int) -> None:
        """The group is scored."""
        self._slots[group_id].status = "ready"

    def restart(self, group_id: int, version: int, *, failed: bool = False) -> int:
        """Sampling begins again, at `version`; returns how often it failed so far."""
        slot = self._slots[group_id]
        slot.status, slot.version = "running", max(slot.version, version)
        slot.failures += failed
        return slot.failures

    def redraw(self, group_id: int, version: int) -> None:
        """Like `restart`, for a group that `overdue` named: it will not be named again."""
        self.restart(group_id, version)
        slot = self._slots.pop(group_id)
        slot.redrawn, slot.place = True, self._next_place()
        self._slots[group_id] = slot

    def select(self, version: int, *, scored: bool = True) -> list[int] | None:
        """The ordinals of the groups that train at `version`, oldest first; None while some have to be waited for.

        Those that were taken for the step already are left out.

        scored: only groups whose scores are there; else it is enough that they are sampled.
        """
        if sum(slot.status in _DONE[scored] for slot in self._slots.values()) < self._places():
            return None
        chosen = self._choose(version, scored)
        return sorted(chosen) if len(chosen) == self._places() else None

    def select_part(self, version: int) -> list[int]:
        """The ordinals of those scored groups that may train at `version` whatever becomes of the others, oldest first:
        fewer than the step has places, if some have to be waited for."""
        return sorted(self._choose(version, scored=True))

    def _choose(self, version: int, scored: bool) -> list[int]:
        """For the step's places, one after the other, as long as there is a group that may take the next."""
        left = [slot for slot in self._slots.values() if slot.status != "taken"]
        chosen: list[int] = []
        places = self._places()
        deadlines = Counter(self._deadline(slot) for slot in left)
        while len(chosen) < places:
            allowed = self._allowed(deadlines, version, places - len(chosen))
            pick = next((slot for slot in self._candidates(left, scored) if allowed(slot)), None)
            if pick is None:
                break
            left.remove(pick)
            deadlines[self._deadline(pick)] -= 1
            chosen.append(pick.group_id)
        return chosen

    def _places(self) -> int:
        """Of the step, that no group was taken for yet."""
        return self._step - sum(slot.status == "taken" for slot in self._slots.values())

    def take(self, group_ids: list[int], version: int) -> None:
        """The groups go into the step that trains at `version`: all of them, or a part of what `select_part` gave.

        Raises RuntimeError rather than break the bound.
        """
        stale = [o for o in group_ids if version - self._slots[o].version > self._max_age]
        if stale:
            raise RuntimeError(f"groups {stale} are older than {self._max_age} steps at version {version}")
        for group_id in group_ids:
            self._slots[group_id].status = "taken"

    def release(self) -> list[int]:
        """The step ended: its groups leave, and make room. Returns their ordinals."""
        gone = self.with_status("taken")
        for group_id in gone:
            del self._slots[group_id]
        return gone

    def overdue(self, version: int) -> list[int]:
        """Running groups, drawn but once, that the step at `version` waits for although it could do without them.

        Drawn anew they need not train now. Empty while complete groups are too few anyway.
        """
        left = [slot for slot in self._slots.values() if slot.status != "taken"]
        complete = [slot for slot in left if slot.status != "running"]
        due = [slot for slot in left if self._deadline(slot) == version and slot.status == "running"]
        if self._max_age == 0 or len(complete) < self._places() or any(slot.redrawn for slot in due):
            return []
        return [slot.group_id for slot in due]

    def waits_for(self) -> Literal["rollouts", "scores", "oldest"]:
        """What keeps the next step from starting: too few groups sampled, or scored, or older ones that come first."""
        counts = Counter(slot.status for slot in self._slots.values())
        if counts["ready"] + counts["sampled"] < self._places():
            return "rollouts"
        return "scores" if counts["ready"] < self._places() else "oldest"

    def status(self, group_id: int) -> Status | None:
        """Of one group; None if it is not active."""
        slot = self._slots.get(group_id)
        return slot.status if slot else None

    def group_ids(self) -> list[int]:
        """All active groups, in the order of their places."""
        return list(self._slots)

    def with_status(self, status: Status) -> list[int]:
        """Ordinals of the groups in a state, oldest first."""
        return sorted(slot.group_id for slot in self._slots.values() if slot.status == status)

    def occupancy(self) -> dict[int, int]:
        """Active groups by the version they were admitted at."""
        return dict(sorted(Counter(slot.version for slot in self._slots.values()).items()))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint between two steps: every active group."""
        return {"placed": self._placed, "slots": [asdict(slot) for slot in self._slots.values()]}

    def load_state_dict(self, state: dict[str, Any], version: int) -> tuple[list[int], list[int]]:
        """What `state_dict` gave; groups that were not ready begin anew at `version`.

        Returns those, and the groups for which there is no room, as after a change of N or S: to be admitted later.
        """
        self._placed, self._sampled = state["placed"], len(state["slots"])
        again, beyond = [], []
        for slot in (GroupSlot(**fields) for fields in state["slots"]):
            if not self.room():
                beyond.append(slot.group_id)
                continue
            self._slots[slot.group_id] = slot
            if slot.status != "ready" or not self._feasible(version):
                self.restart(slot.group_id, version)
                again.append(slot.group_id)
        return again, beyond

    def _feasible(self, version: int) -> bool:
        """The invariant at the head of this file."""
        deadlines = Counter(self._deadline(slot) for slot in self._slots.values())
        upto = accumulate(deadlines[deadline] for deadline in sorted(deadlines))
        return all(count <= (d - version + 1) * self._step for d, count in zip(sorted(deadlines), upto))

    def _next_place(self) -> int:
        self._placed += 1
        return self._placed - 1

    def _deadline(self, slot: GroupSlot) -> int:
        return slot.version + self._max_age

    def _allowed(self, deadlines: Mapping[int, int], version: int, places: int) -> Callable[[GroupSlot], bool]:
        """Which of the groups left may take one of this step's `places` so that all deadlines can still be kept.

        deadlines: groups left by the last version that may train them.
        """
        due, tight = 0, None
        for deadline in sorted(deadlines):
            due += deadlines[deadline]
            if tight is None and due - (deadline - version) * self._step >= places:
                tight = deadline
        return lambda slot: tight is None or self._deadline(slot) <= tight

    def _candidates(self, left: list[GroupSlot], scored: bool) -> Iterator[GroupSlot]:
        """Complete groups in the order in which the policy would have them."""
        done = _DONE[scored]
        # They stand in the order of their places.
        if self._policy == "in_order":
            yield from (slot for slot in left[:1] if slot.status in done)
        elif self._policy == "windowed_fifo":
            end = left[0].place + self._window if left else 0
            yield from (slot for slot in left if slot.status in done and slot.place < end)
        else:
            yield from sorted((slot for slot in left if slot.status in done), key=lambda slot: slot.finished)
