"""Dispatcher: the one way to sample. Hands requests to engines as they have room, and answers to whoever submitted.

    submit -> PENDING -- engine has room --> SAMPLING -- answer --> delivered
                 ^                            |    |
                 +------ engine is lost ------+    +-- abort --> ABORTING -- engine confirms --> gone

The rollouts of a group go to one engine, where they share their prompt's prefix. An engine gets no more new rollouts
than it decodes at a time, and one group ahead; the rest is PENDING here, so that a free engine finds work whatever long
tail another is at. A later turn goes before new groups, to the engine of the turn before, which has its prefix: up
to as many again as the engine decodes, for no other could take it, and what waits in the engine begins without a round
trip to here. Where some wait there, answers and turns travel several together, up to 0.2 s later. A rollout
that ended makes room by itself, not with its group: of eight answers of log-normal lengths (sigma 1) the longest is 3.1
times the mean, and engines would be a third full.

Where a step is waited for as a whole, an engine begins episodes until its cache is full, at most twice what it decodes,
and they go on side by side: else those that begin last would be alone in the engine at the end. It begins more while
environments are slow, rather than decode fewer. Where steps overlap there is no such end, and an episode that ends
early has younger tokens.

Each engine has two threads: one collects, one sends orders, so that nobody waits for an engine that hangs or is slow
(70 ms to begin 512 rollouts of the tiny model). Everything that can stop a run (replacing an engine, giving up) happens
on the loop's thread, in `repair`, while it waits.
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

from rlctl.config.schema import RunSection
from rlctl.data.tasks import Task
from rlctl.generation.engine import Engine, EngineStats
from rlctl.generation.pool import GeneratorPool
from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.rollout.engine_queue import EngineQueue, RequestState, SubmittedTurn, Submitter, handed_out_together
from rlctl.rollout.patience import TICK_S, Clock, Emit, Patience, ThreadErrors
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutGroup, Sampling
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout

_LOST = (WorkerDied, WorkerError, WorkerTimeout)
_POLL_S = 1.0
_ABORT_S = 5.0
# Later turns that an engine may have, those that wait in it included, over what it decodes at a time.
_AHEAD = 2
# Longer than an engine that answers takes to be collected from.
_CLOSE_S = 3.0


class RolloutDispatcher:
    """Samples on every engine of a pool."""

    def __init__(
        self, pool: GeneratorPool, run: RunSection, emit: Emit, clock: Clock | None = None, *, together: bool = False
    ) -> None:
        """Start two threads for each engine.

        together: all that is submitted is waited for as a whole, as a synchronous step is.
        """
        self._together = together
        self._pool, self._deadline_s, self._clock = pool, run.deadline_s, clock or Clock()
        self._patience = Patience(self._clock, run, emit)
        pool.forget_gone()
        # By the pool's slots.
        self._queues = [EngineQueue(worker, self._clock.now()) for worker in pool.engines]
        # Groups and later turns, in the order in which they begin.
        self._pending: deque[list[SubmittedTurn]] = deque()
        # Engine that sampled a rollout's last turn, for as long as anybody holds the rollout's id.
        self._homes: WeakKeyDictionary[RolloutId, EngineQueue] = WeakKeyDictionary()
        self._held = self._closed = False
        # Tokens that were sampled of requests that were aborted, by all engines so far.
        self.aborted_tokens = 0
        self._changed = threading.Condition(threading.RLock())
        self._errors = ThreadErrors(self._changed)
        self._threads = [
            self._clock.spawn(f"{step.__name__.strip('_')}-{index}", self._errors.guarded(partial(step, index)))
            for index in range(len(self._queues))
            for step in (self._collect, self._send)
        ]

    def submit(
        self, requests: Sequence[TurnRequest], submitter: Submitter, *, ahead: bool = False, more: bool = False
    ) -> None:
        """Sample requests, those of a group in a row; `submitter` gets the answers one by one.

        ahead: before whatever is PENDING, but for later turns. more: turns of the same rollouts may follow, until
        `finish`. Raises RuntimeError while the engines are asleep.
        """
        self._pool.require_awake()
        with self._changed:
            front = next(
                (n for n, group in enumerate(self._pending) if not group[0].request.id.turn), len(self._pending)
            )
            for group in handed_out_together([SubmittedTurn(request, submitter, more) for request in requests]):
                early = ahead or group[0].request.id.turn > 0
                self._pending.insert(front if early else len(self._pending), group)
                front += early
            self._hand_out()

    def finish(self, rollouts: Collection[RolloutId]) -> None:
        """Learn that no turn of these rollouts follows: their engines may begin others."""
        with self._changed:
            for rollout in rollouts:
                if home := self._homes.get(rollout):
                    home.episodes.discard(rollout)
            if self._pending:
                self._hand_out()

    def sample(
        self,
        runner: RolloutRunner,
        sampling: Sampling,
        tasks: Sequence[Task],
        version: int,
        first_place: int = 0,
    ) -> list[RolloutGroup]:
        """Sample a group of each task ahead of whatever is PENDING, wait, and return the groups in order.

        runner: plays the rollouts with these engines. first_place: place of the first task among the
        `sampling.groups_per_step` ones, from which seeds follow.
        For the loop's thread: engines that are lost meanwhile are replaced. Raises RuntimeError when nothing was
        sampled for `run.deadline_s`, or when `generation.max_restarts` are used up.
        """
        first = version * sampling.groups_per_step + first_place
        groups = [sampling.starts(task, first + place) for place, task in enumerate(tasks)]
        ended, wanted = _Ended(self._changed, self._patience), sum(map(len, groups))
        self._patience.news()
        runner.begin(list(chain(*groups)), ended, ahead=True)
        while len(ended.found) < wanted:
            with self._changed:
                self._clock.wait(self._changed, TICK_S)
            runner.check()
            if self.repair():
                # What the replacement took is no silence of the new engine.
                self._patience.news()
            self._patience.check(
                max(self.last_step(), runner.last_step),
                lambda: f"{sampling.purpose} waits for {wanted - len(ended.found)} rollouts; {self.describe()}",
            )
        return [RolloutGroup(task, [ended.found[each.id] for each in group]) for task, group in zip(tasks, groups)]

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        """Stop sampling these requests; none of them is delivered afterwards. Returns those that were not done yet.

        Waits for the engines to confirm, but not long for one that does not answer: it gets no new work meanwhile.
        """
        wanted = set(ids)
        with self._changed:
            kept = [[each for each in group if each.request.id not in wanted] for group in self._pending]
            stopped = [each.request.id for each in chain(*self._pending) if each.request.id in wanted]
            self._pending = deque(group for group in kept if group)
            for queue in self._queues:
                share = [each for each in queue.sampling() if each.request.id in wanted]
                for each in share:
                    each.state = RequestState.ABORTING
                if share:
                    queue.order(Engine.abort, [each.request.id for each in share], self._clock.now())
                    stopped += [each.request.id for each in share]
            self._changed.notify_all()
            end = self._clock.now() + _ABORT_S
            while (left := end - self._clock.now()) > 0 and any(
                len(queue.sampling()) < len(queue.requests) for queue in self._queues if not queue.lost
            ):
                self._clock.wait(self._changed, left)
        return stopped

    def drain(self) -> bool:
        """Begin no more requests until `resume`; return whether none is being sampled now, but by engines that are
        lost."""
        with self._changed:
            self._held = True
            self._lose_silent()
            return not any(queue.requests and not queue.lost for queue in self._queues)

    def resume(self) -> None:
        """Begin requests again, after a sync; those of engines that it replaced begin again."""
        self._adopt()
        with self._changed:
            self._held = False
            self._hand_out()

    def repair(self) -> bool:
        """Replace engines that are lost or do nothing; their requests begin again. Returns whether there were any.

        For the loop's thread while it waits: the trainer must be at the pool's version. Raises RuntimeError when
        `generation.max_restarts` are used up.
        """
        with self._changed:
            self._lose_silent()
            lost = {i: queue.lost for i, queue in enumerate(self._queues) if queue.lost and self._is_current(i)}
            early = [index for index in lost if not self._queues[index].stats.tokens]
        if lost:
            self._pool.replace(lost, early)
        self._adopt()
        return bool(lost)

    def describe(self) -> str:
        """Return what every engine is at, for a human who wonders what the run waits for."""
        now = self._clock.now()
        with self._changed:
            queues = [
                f"{queue.worker.name} samples {len(queue.sampling())} rollouts, silent for {now - queue.last:.0f} s"
                for queue in self._queues
            ]
            return "; ".join([*queues, f"{sum(map(len, self._pending))} rollouts not begun"])

    def stats(self) -> list[EngineStats]:
        """Return what each engine did so far, as it said when it was last collected from: at most a second ago."""
        with self._changed:
            return [queue.stats for queue in self._queues]

    def last_step(self) -> float:
        """Return when any engine last did something, by the clock."""
        with self._changed:
            return max(queue.last for queue in self._queues)

    def close(self) -> None:
        """Deliver nothing from now on, and call no engine.

        A thread that is in a call of Ray's while Ray shuts down ends the whole process without a word (Ray 2.60: "The
        core worker has already been shutdown"), so that a run that was saved would exit with 1. An engine that does
        not answer is ended for that.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = self._clock.now() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock.now()))
        if any(thread.is_alive() for thread in self._threads):
            self._pool.kill()
            for thread in self._threads:
                thread.join(_CLOSE_S)

    def _hand_out(self) -> None:
        """Begin PENDING groups, each on the engine with the fewest tokens ahead of it, later turns at their home."""
        loads = {queue: sum(e.request.max_new_tokens for e in queue.requests.values()) for queue in self._queues}
        waiting: deque[list[SubmittedTurn]] = deque()
        most = self._pool.at_a_time
        while self._pending and not self._held and not self._closed:
            request = self._pending[0][0].request.id
            home = self._homes.get(request.rollout) if request.turn else None
            if home not in self._queues or home.lost:
                home = None
            # Engines that take later turns, and those of them that take new rollouts.
            taking = [each for each in self._queues if not each.lost and len(each.requests) < _AHEAD * most]
            free = [each for each in taking if self._begins(each, self._pending[0][0])]
            if not taking or (not free and not request.turn):
                # Later turns are before first ones, but for those of engines that were lost.
                break
            group = self._pending.popleft()
            queue = home if home in taking else None
            if home is None:
                queue = min(free, key=lambda each: loads[each], default=None)
            if queue is None:
                waiting.append(group)
                continue
            for each in group:
                each.state, queue.requests[each.request.id] = RequestState.SAMPLING, each
                rollout = each.request.id.rollout
                if each.more:
                    if before := self._homes.get(rollout):
                        before.episodes.discard(rollout)
                    queue.episodes.add(rollout)
                self._homes[rollout] = queue
                loads[queue] += each.request.max_new_tokens
            queue.last = self._clock.now()
            queue.order(Engine.submit, [each.request for each in group], queue.last)
        self._pending.extendleft(reversed(waiting))
        self._changed.notify_all()

    def _begins(self, queue: EngineQueue, first: SubmittedTurn) -> bool:
        """Return whether an engine that takes requests takes one more rollout, see the head of this file."""
        most = self._pool.at_a_time
        if len(queue.requests) < most:
            return True
        return self._together and first.more and len(queue.episodes) < min(_AHEAD * most, queue.stats.holds)

    def _send(self, index: int) -> bool:
        """Send an engine its next order; return False at the end."""
        with self._changed:
            queue = self._queues[index]
            if self._closed:
                return False
            if queue.lost or not queue.orders:
                self._clock.wait(self._changed, _POLL_S)
                return True
            if (left := queue.gathers(self._pool.at_a_time) - self._clock.now()) > 0:
                self._clock.wait(self._changed, left)
                return True
            method, what = queue.orders.popleft()
            queue.ordered = self._clock.now()
        try:
            (answer,) = queue.worker.start(method, what).wait(self._deadline_s)
        except _LOST as error:
            self._lose(queue, error)
            return True
        if method is Engine.abort:
            with self._changed:
                self.aborted_tokens += answer or 0
                for each in what:
                    queue.requests.pop(each, None)
                self._hand_out()
        return True

    def _collect(self, index: int) -> bool:
        """Collect an engine's answers and deliver those that are wanted; return False at the end."""
        with self._changed:
            if self._closed:
                return False
            queue = self._queues[index]
            if queue.lost or not self._is_current(index):
                self._clock.wait(self._changed, _POLL_S)
                return True
        try:
            (finished,) = queue.worker.start(Engine.collect, _POLL_S).wait(self._deadline_s)
        except _LOST as error:
            self._lose(queue, error)
            return True
        with self._changed:
            if finished.stats != queue.stats:
                queue.last = self._clock.now()
            holds, queue.stats = queue.stats.holds, finished.stats
            if not finished.ids:
                if holds != queue.stats.holds:
                    self._hand_out()
                return True
            pairs = [(queue.requests.get(each), one) for each, one in zip(finished.ids, finished.columns.unpack())]
            wanted = [(one, answer) for one, answer in pairs if one and one.state is RequestState.SAMPLING]
            self.aborted_tokens += sum(
                len(answer.tokens) for one, answer in pairs if one and one.state is RequestState.ABORTING
            )
            # One that is ABORTING stays until the engine confirms: the order must not reach it when it begins again.
            for one, _ in wanted:
                del queue.requests[one.request.id]
            self._hand_out()
            # Under the lock: an abort, or a restart, must not overtake an answer.
            for submitter in {one.submitter for one, _ in wanted} if not self._closed else ():
                submitter.completed([(one.request, answer) for one, answer in wanted if one.submitter is submitter])
        return True

    def _lose(self, queue: EngineQueue, error: Exception) -> None:
        with self._changed:
            queue.lost = queue.lost or error
            self._changed.notify_all()

    def _lose_silent(self) -> None:
        self._errors.check()
        for queue in self._queues:
            if queue.requests and not queue.lost and self._clock.now() - queue.last >= self._deadline_s:
                queue.lost = WorkerTimeout("collect", [queue.worker.name], self._deadline_s, "run.deadline_s")

    def _is_current(self, index: int) -> bool:
        return self._pool.slots[index] is self._queues[index].worker

    def _adopt(self) -> None:
        """Take note of engines that were replaced, by `repair` or by a sync: requests of the old ones begin again."""
        again: list[SubmittedTurn] = []
        with self._changed:
            replaced = [(index, queue) for index, queue in enumerate(self._queues) if not self._is_current(index)]
            if not replaced:
                return
            for index, queue in replaced:
                again += queue.sampling()
                queue.requests = {}
                if worker := self._pool.slots[index]:
                    self._queues[index] = EngineQueue(worker, self._clock.now())
                else:
                    queue.lost = queue.lost or WorkerDied("collect", [queue.worker.name], "its node is gone")
            for each in again:
                each.state = RequestState.PENDING
            self._pending.extendleft(reversed(handed_out_together(again)))
            self._hand_out()
        for submitter in {each.submitter for each in again}:
            submitter.restarted([each.request for each in again if each.submitter is submitter])


class _Ended:
    """Taker of `RolloutDispatcher.sample`."""

    def __init__(self, changed: threading.Condition, patience: Patience) -> None:
        self._changed, self._patience = changed, patience
        self.found: dict[RolloutId, Rollout] = {}

    def ended(self, rollouts: list[Rollout]) -> None:
        with self._changed:
            self.found |= {each.id: each for each in rollouts}
            self._patience.news()
            self._changed.notify_all()

    def restarted(self, rollouts: list[RolloutId], afresh: bool) -> None:
        pass
