"""Groups on their way through the engines: handed out as engines have room, delivered one by one as they end.

An engine gets no more rollouts than it decodes at a time, and one group ahead; the rest waits here, so that a free
engine finds work whatever long tail another one is at. A rollout that ended makes room at once, not with its group: of
eight answers of log-normal lengths (sigma 1) the longest is 3.1 times the mean, so engines would be a third full.
A thread an engine collects, another tells it what to begin and what to stop (an engine takes 70 ms for 512 rollouts of
the tiny model, which nobody need wait for, nor for one that hangs); everything that can stop a run (replacing an
engine, giving up) is left to the caller's thread, in `repair`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.generation.active_requests import EngineStats, FinishedGroups
from rlctl.generation.engine import Engine
from rlctl.generation.pool import GeneratorPool
from rlctl.generation.requests import Rollout, TurnRequest
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Worker

Order = Callable[[Engine, list[Any]], None]
Deliver = Callable[[list[tuple[str, list[Rollout]]]], None]
_POLL_S = 1.0
_ABORT_S = 5.0
# Longer than an engine that answers takes to be collected from.
_CLOSE_S = 3.0


@dataclass
class _EngineQueue:
    """One engine and what it is at. last: when it last did anything. lost: why it must be replaced. ended: of groups
    outstanding, rollouts that are done.

    orders: methods and their arguments that it has not been told yet. leaving: groups that it was not told yet to stop.
    dropped: groups that nobody waits for any more, but that may have ended before the engine knew; stopped: of them,
    those of which it knows.
    """

    worker: Worker
    orders: deque[tuple[Order, list[Any]]] = field(default_factory=deque)
    outstanding: dict[str, TurnRequest] = field(default_factory=dict)
    leaving: dict[str, TurnRequest] = field(default_factory=dict)
    dropped: dict[str, TurnRequest] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    counters: EngineStats = field(default_factory=EngineStats)
    ended: dict[str, int] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)
    lost: Exception | None = None

    @property
    def busy(self) -> list[TurnRequest]:
        """What it samples, wanted or not."""
        return [*self.outstanding.values(), *self.leaving.values()]

    @property
    def rollouts(self) -> int:
        return sum(request.num_samples - self.ended.get(request.id, 0) for request in self.busy)

    def drop(self, names: list[str]) -> list[TurnRequest]:
        """Wait for these no more."""
        found = [self.outstanding.pop(name) for name in names if name in self.outstanding]
        self.dropped |= {request.id: request for request in found}
        return found

    @property
    def cost(self) -> int:
        return sum(request.cost for request in self.busy)


class RolloutDispatcher:
    """Samples groups on every engine of a pool; `deliver` gets them, on threads of the stream."""

    def __init__(self, pool: GeneratorPool, deliver: Deliver, deadline_s: float) -> None:
        self._pool, self._deliver, self._deadline_s = pool, deliver, deadline_s
        pool.forget_gone()
        # By the pool's slots.
        self._queues = [_EngineQueue(worker) for worker in pool.engines]
        self._pending: deque[TurnRequest] = deque()
        self._held = self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._threads = [
            threading.Thread(target=target, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(len(self._queues))
            for name, target in (("collect", self._collect), ("tell", self._tell))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: list[TurnRequest]) -> None:
        """More groups to sample, in this order as far as engines are alike."""
        self._pool.require_awake()
        with self._changed:
            self._pending.extend(requests)
            self._hand_out()

    def abort(self, ids: list[str]) -> list[TurnRequest]:
        """Stop sampling these groups; none of them is delivered afterwards. Returns those that were not done yet.

        Waits for the engines to know, but not long for one that does not answer: it gets no new work meanwhile.
        """
        with self._changed:
            found = [request for request in self._pending if request.id in ids]
            self._pending = deque(request for request in self._pending if request.id not in ids)
            for queue in self._queues:
                if share := [name for name in ids if name in queue.outstanding]:
                    stopped = queue.drop(share)
                    queue.leaving |= {request.id: request for request in stopped}
                    self._order(queue, Engine.abort, share)
                    found += stopped
            self._changed.wait_for(
                lambda: not any(queue.leaving and not queue.lost for queue in self._queues), _ABORT_S
            )
        return found

    def drain(self) -> bool:
        """Begin no more groups until `go_on`; whether none is being sampled now, but by engines that are lost."""
        with self._changed:
            self._held = True
            self._lose_silent()
            return not any(queue.busy and not queue.lost for queue in self._queues)

    def go_on(self) -> None:
        """Begin groups again."""
        with self._changed:
            self._held = False
            self._hand_out()

    def repair(self) -> list[str]:
        """Replace engines that were lost or stand still; returns the groups whose sampling begins anew.

        Raises RuntimeError when `generation.max_restarts` are used up.
        """
        with self._changed:
            self._lose_silent()
            lost = {i: queue.lost for i, queue in enumerate(self._queues) if queue.lost and self._is_current(i)}
        if lost:
            self._pool.replace({index: error for index, error in lost.items() if error})
        with self._changed:
            anew = [request for index in range(len(self._queues)) for request in self._renewed(index)]
            self._pending.extendleft(reversed(anew))
            self._hand_out()
            self._changed.notify_all()
        return [request.id for request in anew]

    def describe(self) -> str:
        """What every engine is at, for a human who wonders what the run waits for."""
        now = time.monotonic()
        with self._changed:
            queues = [
                f"{queue.worker.name} samples {len(queue.outstanding)} groups, silent for {now - queue.last:.0f} s"
                for queue in self._queues
            ]
            return "; ".join([*queues, f"{len(self._pending)} groups not begun"])

    def counters(self) -> list[EngineStats]:
        """What each engine did so far, as it said when it last delivered: at most a second ago."""
        with self._changed:
            return [queue.counters for queue in self._queues]

    def last_step(self) -> float:
        """When any engine last did something, by `time.monotonic`."""
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
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._pool.kill()
            for thread in self._threads:
                thread.join(_CLOSE_S)

    def _lose_silent(self) -> None:
        for queue in self._queues:
            if queue.busy and not queue.lost and time.monotonic() - queue.last > self._deadline_s:
                queue.lost = WorkerTimeout("collect", [queue.worker.name], self._deadline_s, "run.deadline_s")

    def _is_current(self, index: int) -> bool:
        return self._pool.slots[index] is self._queues[index].worker

    def _renewed(self, index: int) -> list[TurnRequest]:
        """Take note of an engine that was replaced, here or in a refit: what the old one was at begins anew."""
        queue = self._queues[index]
        if self._is_current(index):
            return []
        if worker := self._pool.slots[index]:
            self._queues[index] = _EngineQueue(worker)
        else:
            queue.lost = queue.lost or WorkerDied("collect", [queue.worker.name], "its node is gone")
        return queue.drop(list(queue.outstanding))

    def _hand_out(self) -> None:
        """Who begins what now: each group goes to the engine with the fewest tokens ahead of it."""
        while self._pending and not self._held and not self._closed:
            free = [queue for queue in self._queues if not queue.lost and queue.rollouts < self._pool.at_a_time]
            if not free:
                return
            queue = min(free, key=lambda queue: queue.cost)
            request = self._pending.popleft()
            queue.outstanding[request.id], queue.last = request, time.monotonic()
            self._order(queue, Engine.submit, [request])

    def _order(self, queue: _EngineQueue, method: Order, what: list[Any]) -> None:
        if queue.orders and queue.orders[-1][0] == method:
            queue.orders[-1][1].extend(what)
        else:
            queue.orders.append((method, what))
        self._changed.notify_all()

    def _tell(self, index: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queues[index].orders)
                if self._closed:
                    return
                queue = self._queues[index]
                method, what = queue.orders.popleft()
            try:
                queue.worker.start(method, what).wait(self._deadline_s)
            except (WorkerDied, WorkerError, WorkerTimeout) as error:
                self._lose(queue, error)
                continue
            if method is Engine.abort:
                self._forget(queue, what)

    def _forget(self, queue: _EngineQueue, names: list[str]) -> None:
        with self._changed:
            for name in names:
                queue.leaving.pop(name, None)
            queue.stopped += names
            self._hand_out()
            self._changed.notify_all()

    def _lose(self, queue: _EngineQueue, error: Exception) -> None:
        with self._changed:
            queue.lost = queue.lost or error
            self._changed.notify_all()

    def _collect(self, index: int) -> None:
        while not self._closed:
            queue = self._queues[index]
            if queue.lost or not self._is_current(index):
                with self._changed:
                    self._changed.wait(_POLL_S)
                continue
            # Of what it knew before it is asked it tells now or never.
            with self._changed:
                stopped, queue.stopped = queue.stopped, []
            try:
                delivery = queue.worker.start(Engine.collect, _POLL_S).wait(self._deadline_s)[0]
            except (WorkerDied, WorkerError, WorkerTimeout) as error:
                self._lose(queue, error)
                continue
            self._accept(queue, delivery)
            with self._changed:
                for name in stopped:
                    queue.dropped.pop(name, None)

    def _accept(self, queue: _EngineQueue, delivery: FinishedGroups) -> None:
        ids = delivery.ids
        with self._changed:
            if delivery.counters != queue.counters:
                queue.last = time.monotonic()
            queue.counters, queue.ended = delivery.counters, delivery.ended
            requests = [queue.outstanding.get(name) or queue.dropped[name] for name in ids]
            wanted = [queue.outstanding.pop(name, None) is not None for name in ids]
            for name in ids:
                queue.leaving.pop(name, None)
            self._hand_out()
        ended = zip(ids, delivery.columns.split(requests), wanted)
        if (groups := [(name, group) for name, group, kept in ended if kept]) and not self._closed:
            self._deliver(groups)
