"""Groups on their way through the engines: handed out as engines have room, delivered one by one as they end.

An engine gets no more rollouts than it decodes at a time, and one group ahead; the rest waits here, so that a free
engine finds work whatever long tail another one is at. A rollout that ended makes room at once, not with its group: of
eight answers of log-normal lengths (sigma 1) the longest is 3.1 times the mean, so engines would be a third full.
A thread an engine collects, and one hands out (an engine takes 70 ms for 512 rollouts of the tiny model, which the
trainer need not wait for); everything that can stop a run (replacing an engine, giving up) is left to the caller's
thread, in `repair`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlctl.generation.pool import GeneratorPool
from rlctl.generation.requests import Completion, SampleRequest
from rlctl.generation.running import Counters, Delivery
from rlctl.refit.refit import Refit
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Worker

Deliver = Callable[[list[tuple[str, list[Completion]]]], None]
_POLL_S = 1.0


@dataclass
class _Lane:
    """One engine and what it is at. last: when it last did anything. lost: why it must be replaced. ended: of groups
    outstanding, rollouts that are done.

    dropped: groups that nobody waits for any more, but that may have ended before the engine knew.
    """

    worker: Worker
    outstanding: dict[str, SampleRequest] = field(default_factory=dict)
    dropped: dict[str, SampleRequest] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    ended: dict[str, int] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)
    lost: Exception | None = None

    @property
    def rollouts(self) -> int:
        return sum(r.num_samples - self.ended.get(r.id, 0) for r in self.outstanding.values())

    def drop(self, names: list[str]) -> list[SampleRequest]:
        """Wait for these no more."""
        found = [self.outstanding.pop(name) for name in names if name in self.outstanding]
        self.dropped |= {request.id: request for request in found}
        return found

    @property
    def cost(self) -> int:
        return sum(request.cost for request in self.outstanding.values())


class RolloutStream:
    """Samples groups on every engine of a pool; `deliver` gets them, on threads of the stream."""

    def __init__(self, pool: GeneratorPool, deliver: Deliver, deadline_s: float) -> None:
        self._pool, self._deliver, self._deadline_s = pool, deliver, deadline_s
        pool.forget_gone()
        # By the pool's slots.
        self._lanes = [_Lane(worker) for worker in pool.engines]
        self._pending: deque[SampleRequest] = deque()
        self._held = self._closed = self._wanted = False
        self._changed = threading.Condition(threading.RLock())
        # Held while engines are told something, and never asked for by who holds `_changed`.
        self._telling = threading.Lock()
        for index in range(len(self._lanes)):
            threading.Thread(target=self._collect, args=(index,), name=f"collect-{index}", daemon=True).start()
        threading.Thread(target=self._keep_dispatching, name="dispatch", daemon=True).start()

    def submit(self, requests: list[SampleRequest]) -> None:
        """More groups to sample, in this order as far as engines are alike."""
        with self._changed:
            self._pending.extend(requests)
        self._dispatch()

    def abort(self, ids: list[str]) -> list[SampleRequest]:
        """Stop sampling these groups; none of them is delivered afterwards. Returns those that were not done yet."""
        with self._telling:
            with self._changed:
                found = [request for request in self._pending if request.id in ids]
                self._pending = deque(request for request in self._pending if request.id not in ids)
                shares = [(lane, [name for name in ids if name in lane.outstanding]) for lane in self._lanes]
                for lane, share in shares:
                    found += lane.drop(share)
            self._tell("abort", shares)
        return found

    def drain(self) -> bool:
        """Begin no more groups until `go_on`; whether none is being sampled now, but by engines that are lost."""
        with self._changed:
            self._held = True
            self._lose_silent()
            return not any(lane.outstanding and not lane.lost for lane in self._lanes)

    def go_on(self) -> None:
        """Begin groups again."""
        with self._changed:
            self._held = False
        self._dispatch()

    def repair(self, refit: Refit) -> list[str]:
        """Replace engines that were lost or stand still; returns the groups whose sampling begins anew.

        Raises RuntimeError when `generation.max_restarts` are used up.
        """
        with self._changed:
            self._lose_silent()
            lost = {i: lane.lost for i, lane in enumerate(self._lanes) if lane.lost and self._is_current(i)}
        if lost:
            self._pool.replace({index: error for index, error in lost.items() if error}, refit)
        with self._changed:
            anew = [request for index in range(len(self._lanes)) for request in self._renewed(index)]
            self._pending.extendleft(reversed(anew))
            self._changed.notify_all()
        if anew:
            self._dispatch()
        return [request.id for request in anew]

    def describe(self) -> str:
        """What every engine is at, for a human who wonders what the run waits for."""
        now = time.monotonic()
        with self._changed:
            lanes = [
                f"{lane.worker.name} samples {len(lane.outstanding)} groups, silent for {now - lane.last:.0f} s"
                for lane in self._lanes
            ]
            return "; ".join([*lanes, f"{len(self._pending)} groups not begun"])

    def counters(self) -> list[Counters]:
        """What each engine did so far, as it said when it last delivered: at most a second ago."""
        with self._changed:
            return [lane.counters for lane in self._lanes]

    def last_step(self) -> float:
        """When any engine last did something, by `time.monotonic`."""
        with self._changed:
            return max(lane.last for lane in self._lanes)

    def close(self) -> None:
        """Deliver nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lose_silent(self) -> None:
        for lane in self._lanes:
            if lane.outstanding and not lane.lost and time.monotonic() - lane.last > self._deadline_s:
                lane.lost = WorkerTimeout("collect", [lane.worker.name], self._deadline_s, "run.deadline_s")

    def _is_current(self, index: int) -> bool:
        return self._pool.slots[index] is self._lanes[index].worker

    def _renewed(self, index: int) -> list[SampleRequest]:
        """Take note of an engine that was replaced, here or in a refit: what the old one was at begins anew."""
        lane = self._lanes[index]
        if self._is_current(index):
            return []
        if worker := self._pool.slots[index]:
            self._lanes[index] = _Lane(worker)
        else:
            lane.lost = lane.lost or WorkerDied("collect", [lane.worker.name], "its node is gone")
        return lane.drop(list(lane.outstanding))

    def _dispatch(self) -> None:
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def _keep_dispatching(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                self._wanted = False
                if self._closed:
                    return
            with self._telling:
                with self._changed:
                    shares = self._shares()
                self._tell("submit", shares)

    def _shares(self) -> list[tuple[_Lane, list[SampleRequest]]]:
        """Who begins what now: each group goes to the engine with the fewest tokens ahead of it."""
        shares: list[tuple[_Lane, list[SampleRequest]]] = [(lane, []) for lane in self._lanes]
        while self._pending and not self._held and not self._closed:
            free = [(lane, share) for lane, share in shares if not lane.lost and lane.rollouts < self._pool.at_a_time]
            if not free:
                break
            lane, share = min(free, key=lambda pair: pair[0].cost)
            request = self._pending.popleft()
            lane.outstanding[request.id], lane.last = request, time.monotonic()
            share.append(request)
        return shares

    def _tell(self, method: str, shares: Sequence[tuple[_Lane, Sequence[object]]]) -> None:
        started = [(lane, lane.worker.start(method, share)) for lane, share in shares if share]
        for lane, pending in started:
            try:
                pending.wait(self._deadline_s)
            except (WorkerDied, WorkerError, WorkerTimeout) as error:
                self._lose(lane, error)

    def _lose(self, lane: _Lane, error: Exception) -> None:
        with self._changed:
            lane.lost = lane.lost or error
            self._changed.notify_all()

    def _collect(self, index: int) -> None:
        while not self._closed:
            lane = self._lanes[index]
            if lane.lost or not self._is_current(index):
                with self._changed:
                    self._changed.wait(_POLL_S)
                continue
            try:
                delivery: Delivery = lane.worker.start("collect", _POLL_S).wait(self._deadline_s)[0]
            except (WorkerDied, WorkerError, WorkerTimeout) as error:
                self._lose(lane, error)
                continue
            self._accept(lane, delivery)
            self._dispatch()

    def _accept(self, lane: _Lane, delivery: Delivery) -> None:
        ids = delivery.ids
        with self._changed:
            if delivery.counters != lane.counters:
                lane.last = time.monotonic()
            lane.counters, lane.ended = delivery.counters, delivery.ended
            requests = [lane.outstanding.get(name) or lane.dropped[name] for name in ids]
            wanted = [lane.outstanding.pop(name, None) is not None for name in ids]
        ended = zip(ids, delivery.columns.split(requests), wanted)
        if (groups := [(name, group) for name, group, kept in ended if kept]) and not self._closed:
            self._deliver(groups)
