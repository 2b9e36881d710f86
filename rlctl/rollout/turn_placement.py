"""Placement of turns on engines. An event costs the same with any number of engines."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from rlctl.generation.requests import RequestId, RolloutId
from rlctl.rollout.engine_queue import EngineQueue, SubmittedTurn

# Most turns of an engine, waiting ones included, over the number decoded at a time.
_TURNS_PER_PLACE = 2
# Heaps are rebuilt when fewer than one entry in this many is of use.
_STALE_ENTRIES = 4


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
            if len(self._heap) > _STALE_ENTRIES * len(self._loads) + _STALE_ENTRIES:
                self._heap = [(load, engine.index, id(engine), engine) for engine, load in self._loads.items()]
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
        self._at_a_time = at_a_time
        self._together = together
        # True while nothing may begin.
        self.is_paused = False
        # Batches of turns, in the order in which the three lines begin: of lost engines, of validation, of training.
        self._restarted: deque[list[SubmittedTurn]] = deque()
        self._urgent: deque[list[SubmittedTurn]] = deque()
        self._ordinary: deque[list[SubmittedTurn]] = deque()
        # Engine that sampled a rollout's last turn, where turns may follow.
        self._homes: dict[RolloutId, EngineQueue] = {}
        # Engines that take rollouts of one turn, and of several.
        self._free = {False: LeastLoaded(), True: LeastLoaded()}

    def add(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns as engines have room: later ones before all others, on the engine of the turn before."""
        # Ordered: an engine each, whose later turns came.
        homes: dict[EngineQueue, None] = {}
        for batch in batch_turns(turns):
            first_id = batch[0].request.id
            home = self._homes.get(first_id.rollout) if first_id.turn else None
            if home and not home.lost:
                home.waiting.append(batch)
                homes[home] = None
            elif first_id.turn:
                self._restarted.append(batch)
            elif batch[0].ahead:
                self._urgent.append(batch)
            else:
                self._ordinary.append(batch)
        for home in homes:
            self._begin_waiting(home)
        self.hand_out()

    def add_restarted(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns of a lost engine again, before all others."""
        self._restarted.extendleft(reversed(batch_turns(turns)))
        self.hand_out()

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Learn that no turn of these rollouts follows: their engines may begin others."""
        for rollout in rollouts:
            if home := self._homes.pop(rollout, None):
                home.episodes.discard(rollout)
                self._note_room(home)
        self.hand_out()

    def note_change(self, queue: EngineQueue) -> None:
        """Begin turns after an engine's turns have changed, or it was opened or lost."""
        if queue.lost:
            self._restarted.extend(queue.waiting)
            queue.waiting.clear()
        self._note_room(queue)
        self._begin_waiting(queue)
        self.hand_out()

    def resume(self, queues: Sequence[EngineQueue]) -> None:
        """Begin turns again after a pause. queues: all engines."""
        self.is_paused = False
        for queue in queues:
            self._begin_waiting(queue)
        self.hand_out()

    def hand_out(self) -> None:
        """Begin batches, each on the engine with the lowest load."""
        for line in (self._restarted, self._urgent, self._ordinary):
            while line and not self.is_paused:
                batch = [turn for turn in line[0] if not turn.answer.done()]
                queue = self._free[batch[0].turns_follow].least() if batch else None
                if batch and queue is None:
                    return
                line.popleft()
                if queue:
                    self._begin_batch(queue, batch)

    def count_pending(self, queues: Sequence[EngineQueue]) -> int:
        """Return the number of turns that have no engine. queues: all engines."""
        count = 0
        for line in (self._restarted, self._urgent, self._ordinary, *(queue.waiting for queue in queues)):
            for batch in line:
                count += sum(not turn.answer.done() for turn in batch)
        return count

    def _begin_waiting(self, queue: EngineQueue) -> None:
        """Begin later turns of an engine that wait here, while it takes turns."""
        while queue.waiting and not self.is_paused and len(queue.turns) < _TURNS_PER_PLACE * self._at_a_time:
            batch = [turn for turn in queue.waiting.popleft() if not turn.answer.done()]
            if batch:
                self._begin_batch(queue, batch)

    def _begin_batch(self, queue: EngineQueue, batch: list[SubmittedTurn]) -> None:
        for turn in batch:
            if turn.turns_follow:
                rollout = turn.request.id.rollout
                old_home = self._homes.get(rollout)
                if old_home and old_home is not queue:
                    old_home.episodes.discard(rollout)
                    self._note_room(old_home)
                queue.episodes.add(rollout)
                self._homes[rollout] = queue
        queue.begin(batch)
        self._note_room(queue)

    def _note_room(self, queue: EngineQueue) -> None:
        """Note if an engine takes rollouts, see the head of dispatcher.py."""
        is_live = queue.lost is None
        num_turns = len(queue.turns)
        max_turns = _TURNS_PER_PLACE * self._at_a_time
        # It takes rollouts of one turn.
        takes_single = is_live and num_turns < self._at_a_time
        takes_episodes = takes_single
        if self._together and is_live and num_turns < max_turns:
            takes_episodes |= len(queue.episodes) < min(max_turns, queue.stats.holds)
        self._free[False].note(queue, takes_single)
        self._free[True].note(queue, takes_episodes)


def batch_turns(turns: Sequence[SubmittedTurn]) -> list[list[SubmittedTurn]]:
    """Return the batches that are handed out: first turns of a group in a row, and turns of one rollout in a row."""
    batches: list[list[SubmittedTurn]] = []
    previous: RequestId | None = None
    for turn in turns:
        current = turn.request.id
        if previous is None:
            continues_batch = False
        elif current.turn == previous.turn == 0 and current.rollout.siblings == previous.rollout.siblings:
            continues_batch = True
        else:
            continues_batch = current.rollout == previous.rollout
        if continues_batch:
            batches[-1].append(turn)
        else:
            batches.append([turn])
        previous = current
    return batches
