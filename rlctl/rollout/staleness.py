"""Staleness rule: chooses the next groups to train, so that no group ever exceeds the bound on age. Pure functions.

A group trains at version v only if its age, v minus the oldest version among its tokens, is at most S (contract 1).

Symbols: N is the number of groups in a step, S = max_age, v the version of the next step. A group admitted while the
generator serves version g has no token older than g, so it keeps the bound if it trains at version g + S or before.
g + S is its deadline. F(d) is the number of groups with a deadline of at most d. At most C = (S + 1) N groups are
between admission and the end of their step. Hence at the start

    F(d) <= (d - v + 1) N   for every d >= v                                                            (feasible)

Call F(d) tight if both sides are equal. `choose` never takes a group with a deadline after d while F(d) is tight. So a
step removes N groups from every tight F(d) while v grows by one. Groups admitted afterwards have deadline v + S, where
F is at most C: the inequality holds again. For d = v it says that at most N groups are due, so they fit into the step.

A group that teaches nothing may leave before its step, and no F(d) grows. Another group is then admitted in its place,
with deadline v + S, where F is at most C less the groups that the step has taken: the inequality holds with the
remaining places for N.

A step may be taken in parts, before all of its groups are complete. The inequality then holds with the number of groups
that the step still lacks in place of N. Groups that complete first are taken first. So a group that comes first in the
order of the policy, but completes later, may train a step later.

No policy deadlocks: all groups of a step are being sampled already, the version does not change while the step waits,
and sampling never waits for the trainer. `in_order` waits for the oldest group. The oldest group always lies in the
window, so once it is complete the window of `windowed_fifo` moves on. `ready_first` waits only for due groups, or for
N complete ones, and C >= N groups are being sampled.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import Literal, Protocol, TypeVar

TrainingOrder = Literal["windowed_fifo", "in_order", "ready_first"]


class Aged(Protocol):
    """The fields of a group that the rule needs."""

    # Lower bound on the weight versions of the group's tokens.
    version: int
    # Place in the order of training.
    place: int
    # Place in the order in which the sampling of groups ended.
    finished: int


Group = TypeVar("Group", bound=Aged)


@dataclass(frozen=True)
class StalenessRule:
    """The bound on age, and the order in which groups train within it."""

    groups_per_step: int
    max_age: int
    policy: TrainingOrder
    # Share of the capacity by which the window of `windowed_fifo` exceeds `groups_per_step`.
    window_fraction: float

    @property
    def capacity(self) -> int:
        """Largest number of groups between admission and the end of their step."""
        return (self.max_age + 1) * self.groups_per_step

    def deadline(self, group: Aged) -> int:
        """Return the last version at which a group may train."""
        return group.version + self.max_age

    def is_feasible(self, groups: Sequence[Aged], version: int) -> bool:
        """Return True if every deadline can be kept from `version` on: (feasible) in the module's docstring."""
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
        """Return up to `places` complete groups for the step at `version`: fewer if the step must wait for others.

        groups: all groups that no step has taken yet, in the order of their places.
        """
        order = sorted(groups, key=lambda group: group.finished) if self.policy == "ready_first" else groups
        # deadline -> (rank in `order`, group) of the complete groups, lowest rank last: `pop` takes the next group.
        complete_groups: dict[int, list[tuple[int, Group]]] = {}
        for rank, group in reversed([*enumerate(order)]):
            if complete(group):
                complete_groups.setdefault(self.deadline(group), []).append((rank, group))
        # deadline -> number of groups that are not chosen yet.
        counts = Counter(map(self.deadline, groups))
        chosen: list[Group] = []
        chosen_places: set[int] = set()
        # The window begins at the oldest group that is not chosen yet.
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
        """Number of consecutive places, counted from the oldest group's place, whose groups may train."""
        if self.policy == "ready_first":
            return inf
        if self.policy == "in_order":
            return 1
        # `groups_per_step` must fit into the window, or no step could fill up while the oldest group is sampled.
        return self.groups_per_step + ceil(self.window_fraction * self.capacity)

    def _find_latest_deadline(self, counts: Mapping[int, int], version: int, places: int) -> int | None:
        """Return the latest deadline of the next group with which all others can be kept; None: any deadline.

        counts: deadline -> number of groups that are not chosen yet.
        """
        num_due = 0
        for deadline in sorted(counts):
            num_due += counts[deadline]
            # Places for groups in the steps up to this deadline. If the groups due by then need all of them, the next
            # group must be one of these groups.
            num_places = places + (deadline - version) * self.groups_per_step
            if num_due >= num_places:
                return deadline
        return None
