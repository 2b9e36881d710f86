"""Placement of turns on engines. An event costs the same with any number of engines."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from rlctl.generation.requests import RolloutId
from rlctl.rollout.engine_queue import EngineQueue, SubmittedTurn

# Most turns of an engine, waiting ones included, over the number decoded at a time.
_AHEAD = 2
# Heaps are rebuilt when fewer than one entry in this many is of use.
_STALE = 4


class LeastLoaded:
    """Engines with room for rollouts, by load.

    A heap whose entries may be out of date: an engine is added again when its load changes.
    """

    def __init__(self) -> None:
        # (load, slot, one number an engine, engine).
        self._heap: list[tuple[int, int, int, EngineQueue]] = []
        # Load of each engine that takes rollouts.
        self._loads: dict[EngineQueue, int] = {}

    def note(self, queue: EngineQueue, takes: bool) -> None:
        """Note an engine's load, and if it takes rollouts."""
        if not takes:
            self._loads.pop(queue, None)
        elif self._loads.get(queue) != queue.load:
            self._loads[queue] = queue.load
            heapq.heappush(self._heap, (queue.load, queue.index, id(queue), queue))
            if len(self._heap) > _STALE * len(self._loads) + _STALE:
                self._heap = [(load, each.index, id(each), each) for each, load in self._loads.items()]
                heapq.heapify(self._heap)

    def least(self) -> EngineQueue | None:
        """Return the engine with the fewest tokens ahead; None if none takes rollouts."""
        while self._heap and self._loads.get(self._heap[0][3]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None


class TurnPlacement:
    """PENDING turns, and the choice of the engine for each.

    at_a_time: turns that an engine decodes. together: a step is waited for as a whole.
    """

    def __init__(self, at_a_time: int, *, together: bool) -> None:
        self._at_a_time, self._together = at_a_time, together
        # True while nothing may begin.
        self.held = False
        # Groups in the order in which they begin: those of lost engines, validation, training.
        self._again, self._ahead, self._first = (deque[list[SubmittedTurn]]() for _ in range(3))
        # Engine that sampled a rollout's last turn, where turns may follow.
        self._homes: dict[RolloutId, EngineQueue] = {}
        # Engines that take rollouts of one turn, and of several.
        self._free = {False: LeastLoaded(), True: LeastLoaded()}

    def add(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns as engines have room: later ones before all others, on the engine of the turn before."""
        homes = dict[EngineQueue, None]()
        for group in handed_out_together(turns):
            first = group[0].request.id
            home = self._homes.get(first.rollout) if first.turn else None
            if home and not home.lost:
                home.waiting.append(group)
                homes[home] = None
            elif first.turn:
                self._again.append(group)
            else:
                (self._ahead if group[0].ahead else self._first).append(group)
        for home in homes:
            self._begin_waiting(home)
        self.hand_out()

    def add_again(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns of a lost engine again, before all others."""
        self._again.extendleft(reversed(handed_out_together(turns)))
        self.hand_out()

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Learn that no turn of these rollouts follows: their engines may begin others."""
        for rollout in rollouts:
            if home := self._homes.pop(rollout, None):
                home.episodes.discard(rollout)
                self._note_room(home)
        self.hand_out()

    def changed(self, queue: EngineQueue) -> None:
        """Begin turns after an engine's turns have changed, or it was opened or lost."""
        if queue.lost:
            self._again.extend(queue.waiting)
            queue.waiting.clear()
        self._note_room(queue)
        self._begin_waiting(queue)
        self.hand_out()

    def release(self, queues: Sequence[EngineQueue]) -> None:
        """Begin turns again after they were held. queues: all engines."""
        self.held = False
        for queue in queues:
            self._begin_waiting(queue)
        self.hand_out()

    def hand_out(self) -> None:
        """Begin groups, each on the engine with the lowest load."""
        for line in (self._again, self._ahead, self._first):
            while line and not self.held:
                group = [each for each in line[0] if not each.answer.done()]
                queue = self._free[group[0].more].least() if group else None
                if group and queue is None:
                    return
                line.popleft()
                if queue:
                    self._begin_turns(queue, group)

    def pending(self, queues: Sequence[EngineQueue]) -> int:
        """Return the number of turns that have no engine. queues: all engines."""
        lines = [self._again, self._ahead, self._first, *(queue.waiting for queue in queues)]
        return sum(not each.answer.done() for each in chain(*chain(*lines)))

    def _begin_waiting(self, queue: EngineQueue) -> None:
        """Begin later turns of an engine that wait here, while it takes turns."""
        while queue.waiting and not self.held and len(queue.turns) < _AHEAD * self._at_a_time:
            if group := [each for each in queue.waiting.popleft() if not each.answer.done()]:
                self._begin_turns(queue, group)

    def _begin_turns(self, queue: EngineQueue, group: list[SubmittedTurn]) -> None:
        for each in group:
            if each.more:
                rollout = each.request.id.rollout
                if (before := self._homes.get(rollout)) and before is not queue:
                    before.episodes.discard(rollout)
                    self._note_room(before)
                queue.episodes.add(rollout)
                self._homes[rollout] = queue
        queue.begin(group)
        self._note_room(queue)

    def _note_room(self, queue: EngineQueue) -> None:
        """Note if an engine takes rollouts, see the head of dispatcher.py."""
        most, turns, lost = self._at_a_time, len(queue.turns), queue.lost is not None
        one = turns < most and not lost
        room = len(queue.episodes) < min(_AHEAD * most, queue.stats.holds) and turns < _AHEAD * most
        self._free[False].note(queue, one)
        self._free[True].note(queue, one or (self._together and room and not lost))


def handed_out_together(submitted: Sequence[SubmittedTurn]) -> list[list[SubmittedTurn]]:
    """Return the batches that are handed out: first turns of a group in a row, and turns of one rollout in a row."""
    groups: list[list[SubmittedTurn]] = []
    for each in submitted:
        own, before = each.request.id, groups[-1][-1].request.id if groups else None
        first = before is not None and own.turn == before.turn == 0 and own.rollout.siblings == before.rollout.siblings
        if before is not None and (first or own.rollout == before.rollout):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups
