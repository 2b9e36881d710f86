"""Placement of turns on engines. A new or finished turn costs the same time with any number of engines."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from rlctl.generation.requests import RequestId, RolloutId
from rlctl.rollout.engine_queue import EngineQueue, SubmittedTurn

# An engine has at most this many times as many turns, waiting ones included, as it decodes at a time.
_TURNS_PER_PLACE = 2
# A heap is rebuilt when fewer than one in this many of its entries is up to date.
_STALE_ENTRIES = 4


class LeastLoaded:
    """Engines with room for rollouts, ordered by load: the most tokens that their turns may still have.

    A heap with outdated entries: when an engine's load changes, a new entry is pushed and the old one stays.
    """

    def __init__(self) -> None:
        # (load, slot, id(engine), engine). The ids are unique, so that the heap never compares two engines.
        self._heap: list[tuple[int, int, int, EngineQueue]] = []
        # Current load of each engine that takes rollouts.
        self._loads: dict[EngineQueue, int] = {}

    def note(self, queue: EngineQueue, takes: bool) -> None:
        """Note an engine's load. takes: True if the engine takes further rollouts."""
        if not takes:
            self._loads.pop(queue, None)
        elif self._loads.get(queue) != queue.load:
            self._loads[queue] = queue.load
            heapq.heappush(self._heap, (queue.load, queue.index, id(queue), queue))
            if len(self._heap) > _STALE_ENTRIES * len(self._loads) + _STALE_ENTRIES:
                self._heap = [(load, engine.index, id(engine), engine) for engine, load in self._loads.items()]
                heapq.heapify(self._heap)

    def least(self) -> EngineQueue | None:
        """Return the engine with the lowest load; None if no engine takes rollouts."""
        while self._heap and self._loads.get(self._heap[0][3]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None


class TurnPlacement:
    """PENDING turns, and the choice of an engine for each turn.

    at_a_time: number of turns that an engine decodes at a time. waits_for_all: True if the caller waits until all
    submitted turns have ended, as in a synchronous step.
    """

    def __init__(self, at_a_time: int, *, waits_for_all: bool) -> None:
        self._at_a_time = at_a_time
        self._waits_for_all = waits_for_all
        # True while no turn may begin.
        self.is_paused = False
        # Batches of turns that wait for any engine. `_restarted` (turns of lost engines) begins first, then `_urgent`
        # (turns with `ahead`, as of a validation), then `_ordinary`.
        self._restarted: deque[list[SubmittedTurn]] = deque()
        self._urgent: deque[list[SubmittedTurn]] = deque()
        self._ordinary: deque[list[SubmittedTurn]] = deque()
        # Rollout with possible further turns -> engine that sampled its last turn.
        self._homes: dict[RolloutId, EngineQueue] = {}
        # Engines that take rollouts of one turn, and engines with room for rollouts of several turns.
        self._single_turn_engines = LeastLoaded()
        self._episode_engines = LeastLoaded()

    def add(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns as engines have room. A rollout's later turn goes before all other turns, to the engine that
        sampled its previous turn."""
        # Engines that got a later turn, in order. A dict keeps the order, and each engine once.
        resumed_homes: dict[EngineQueue, None] = {}
        for batch in batch_turns(turns):
            first_id = batch[0].request.id
            home = self._homes.get(first_id.rollout) if first_id.turn else None
            if home and not home.lost:
                home.waiting.append(batch)
                resumed_homes[home] = None
            elif first_id.turn:
                # The engine of the previous turn is lost or unknown, so any engine may sample this turn.
                self._restarted.append(batch)
            elif batch[0].ahead:
                self._urgent.append(batch)
            else:
                self._ordinary.append(batch)
        for home in resumed_homes:
            self._begin_waiting(home)
        self.hand_out()

    def add_restarted(self, turns: Sequence[SubmittedTurn]) -> None:
        """Begin turns of a lost engine again, before all others."""
        self._restarted.extendleft(reversed(batch_turns(turns)))
        self.hand_out()

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Note that these rollouts have no further turns: their engines may begin other rollouts."""
        for rollout in rollouts:
            if home := self._homes.pop(rollout, None):
                home.episodes.discard(rollout)
                self._note_room(home)
        self.hand_out()

    def note_change(self, queue: EngineQueue) -> None:
        """Begin turns after an engine was opened or lost, or after its turns have changed."""
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
        """Begin batches of turns. Each batch goes to the engine with the lowest load."""
        for line in (self._restarted, self._urgent, self._ordinary):
            while line and not self.is_paused:
                # Without turns that were cancelled while they waited. The batch may be empty then.
                batch = [turn for turn in line[0] if not turn.answer.done()]
                queue = self._choose_engine(batch[0]) if batch else None
                if batch and queue is None:
                    # No engine has room. Later batches must not overtake this one.
                    return
                line.popleft()
                if queue:
                    self._begin_batch(queue, batch)

    def count_pending(self, queues: Sequence[EngineQueue]) -> int:
        """Return the number of PENDING turns. queues: all engines."""
        count = 0
        for line in (self._restarted, self._urgent, self._ordinary, *(queue.waiting for queue in queues)):
            for batch in line:
                count += sum(not turn.answer.done() for turn in batch)
        return count

    def _choose_engine(self, turn: SubmittedTurn) -> EngineQueue | None:
        """Return the engine with the lowest load that takes the turn's rollout; None if none has room."""
        engines = self._episode_engines if turn.turns_follow else self._single_turn_engines
        return engines.least()

    def _begin_waiting(self, queue: EngineQueue) -> None:
        """Begin the later turns that wait for this engine, while the engine has room for turns."""
        while queue.waiting and not self.is_paused and len(queue.turns) < _TURNS_PER_PLACE * self._at_a_time:
            batch = [turn for turn in queue.waiting.popleft() if not turn.answer.done()]
            if batch:
                self._begin_batch(queue, batch)

    def _begin_batch(self, queue: EngineQueue, batch: list[SubmittedTurn]) -> None:
        for turn in batch:
            if turn.turns_follow:
                # From now on the rollout counts among the episodes of this engine only.
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
        """Decide if an engine takes further rollouts. The docstring of dispatcher.py explains the limits."""
        is_live = queue.lost is None
        num_turns = len(queue.turns)
        max_turns = _TURNS_PER_PLACE * self._at_a_time
        takes_single = is_live and num_turns < self._at_a_time
        takes_episodes = takes_single
        if self._waits_for_all and is_live and num_turns < max_turns:
            takes_episodes |= len(queue.episodes) < min(max_turns, queue.stats.holds)
        self._single_turn_engines.note(queue, takes_single)
        self._episode_engines.note(queue, takes_episodes)


def batch_turns(turns: Sequence[SubmittedTurn]) -> list[list[SubmittedTurn]]:
    """Split turns into batches, each for one engine: consecutive first turns of one group, or consecutive turns of one
    rollout."""
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
