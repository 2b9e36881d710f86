"""Rule of staleness: the choice of the next groups to train. None is ever too old. Pure.

A group trains at version v only if its age, v minus the oldest version among its tokens, is at most S (contract 1).

Symbols: N groups a step, S = max_age. A group admitted while the generator serves version g holds no older token, so it
keeps the bound if it trains at version g + S or before: its deadline. At most C = (S + 1) N groups are between
admission and the end of their step, hence (with F(d) the groups with a deadline of at most d, v the version to train)

    F(d) <= (d - v + 1) N   for every d >= v                                                            (feasible)

at the start; and `choose` never takes a group with a later deadline where F(d) is tight. A step then removes N groups
from every tight F(d) while v grows by one, and groups admitted afterwards have deadline v + S, where F is at most C: so
the line holds again. At most N groups are ever due at once. They fit into the step, and none is born stale.

A group that teaches nothing may leave before its step. Another is admitted in its place, at the version trained or
served then. No F(d) grows when it leaves. The new group has deadline v + S, where F is at most C less the groups of the
step: the line holds with the places that are left.

A step may be taken in parts, before all of its groups are there: places are then filled one by one, and the line holds
with the remaining places for N. The first complete groups are taken first then: a group that the policy would have
preferred, had it been there, may train a step later.

No policy deadlocks: all groups of a step are being sampled already, the version does not move while it waits, and
sampling never waits for the trainer. `in_order` waits for the oldest group. The oldest always lies in its own window,
so once it is complete the window of `windowed_fifo` moves on. `ready_first` waits only for due groups, or for N
complete ones, of which C >= N are on their way.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import Literal, Protocol, TypeVar

TrainingOrder = Literal["windowed_fifo", "in_order", "ready_first"]


class Aged(Protocol):
    """A group as the rule sees it."""

    # No token of the group is older.
    version: int
    # Place in the order of training.
    place: int
    # Place in the order in which groups were sampled.
    finished: int


Group = TypeVar("Group", bound=Aged)


@dataclass(frozen=True)
class StalenessRule:
    """The bound on age, and the order in which groups train within it."""

    groups_per_step: int
    max_age: int
    policy: TrainingOrder
    # Share of the capacity that `windowed_fifo` looks beyond a step's worth.
    window_fraction: float

    @property
    def capacity(self) -> int:
        """Largest number of groups between admission and the end of their step."""
        return (self.max_age + 1) * self.groups_per_step

    def deadline(self, group: Aged) -> int:
        """Return the last version that may train a group."""
        return group.version + self.max_age

    def is_feasible(self, groups: Sequence[Aged], version: int) -> bool:
        """Return True if every deadline can be kept from `version` on, see the head of this file."""
        counts = Counter(map(self.deadline, groups))
        deadlines = sorted(counts)
        counts_so_far = accumulate(counts[deadline] for deadline in deadlines)
        return all(
            count <= (deadline - version + 1) * self.groups_per_step
            for deadline, count in zip(deadlines, counts_so_far)
        )

    def choose(
        self, groups: Sequence[Group], complete: Callable[[Group], bool], version: int, places: int
    ) -> list[Group]:
        """Return the groups for the `places` left in the step at `version`, as far as complete ones may take them.

        groups: all that are not in a step yet, in the order of their places.
        """
        order = sorted(groups, key=lambda group: group.finished) if self.policy == "ready_first" else groups
        # Complete groups with their ranks in the order, by deadline; the first of the order is last in its list.
        complete_groups: dict[int, list[tuple[int, Group]]] = {}
        for rank, group in reversed([*enumerate(order)]):
            if complete(group):
                complete_groups.setdefault(self.deadline(group), []).append((rank, group))
        # Groups that are not chosen yet, by deadline.
        counts = Counter(map(self.deadline, groups))
        chosen: list[Group] = []
        chosen_places: set[int] = set()
        remaining = iter(groups)
        oldest = next(remaining, None)
        while len(chosen) < places and oldest is not None:
            latest_deadline = self._find_latest_deadline(counts, version, places - len(chosen))
            candidates = [
                ranked_groups[-1]
                for deadline, ranked_groups in complete_groups.items()
                if ranked_groups and (latest_deadline is None or deadline <= latest_deadline)
            ]
            if not candidates:
                break
            _, next_group = min(candidates, key=lambda candidate: candidate[0])
            if next_group.place >= oldest.place + self._window:
                break
            deadline = self.deadline(next_group)
            complete_groups[deadline].pop()
            counts[deadline] -= 1
            chosen.append(next_group)
            chosen_places.add(next_group.place)
            while oldest is not None and oldest.place in chosen_places:
                oldest = next(remaining, None)
        return chosen

    @property
    def _window(self) -> float:
        """Number of places from the oldest group on that may train."""
        if self.policy == "ready_first":
            return inf
        if self.policy == "in_order":
            return 1
        # A step's worth must fit into the window, or nothing could be trained while the oldest is being sampled.
        return self.groups_per_step + ceil(self.window_fraction * self.capacity)

    def _find_latest_deadline(self, counts: Mapping[int, int], version: int, places: int) -> int | None:
        """Return the latest deadline of the next group with which all deadlines can be kept; None for any.

        counts: groups that are not chosen yet, by deadline.
        """
        due = 0
        for deadline in sorted(counts):
            due += counts[deadline]
            if due - (deadline - version) * self.groups_per_step >= places:
                return deadline
        return None
