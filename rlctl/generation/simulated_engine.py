"""Engines on virtual time that take the time of real ones: the product's own dispatcher samples there.

An engine decodes in steps, one token a sequence, as vLLM does. A step takes `base` seconds and `per_sequence` more for
each sequence in it. The cost of a prompt is in that of its sequence's tokens. Not simulated: a key-value cache that is
too small, and answers that gather for longer than `GATHER_S`.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from itertools import count
from typing import Any

import numpy as np

from rlctl.generation.engine import GATHER_S, EngineStats, FinishedTurns
from rlctl.generation.requests import Completion, PackedCompletions, RequestId, TurnRequest, token_versions
from rlctl.generation.spec import ForcedLengths
from rlctl.utils.event_loop import within

# Two times closer than this are the same.
_SAME_S = 1e-9
_NOTHING = PackedCompletions.pack([])


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of an engine's step."""

    base: float
    # More for each sequence in it.
    per_sequence: float

    def step(self, sequences: int) -> float:
        """Return the seconds of a step with this number of sequences."""
        return self.base + self.per_sequence * sequences


@dataclass(eq=False)
class _Sequence:
    """One answer that an engine samples."""

    id: RequestId
    # (first token, weight version) of each stretch of tokens.
    stretches: list[tuple[int, int]]
    # Tokens of the answer.
    length: int
    # Step of the engine that samples its first token.
    first: int = 0


class SimulatedEngine:
    """One engine: `Engine`, as far as the dispatcher calls it, on the clock `now`. `collect` belongs to its loop."""

    def __init__(self, cost: DecodeCost, at_a_time: int, lengths: ForcedLengths, now: Callable[[], float]) -> None:
        self._cost, self._at_a_time, self._lengths, self._now = cost, at_a_time, lengths, now
        self._version = 0
        # Steps so far, and the beginning of the current one.
        self._steps, self._began = 0, 0.0
        # The times and tokens of `EngineStats`.
        self._busy, self._paused, self._tokens = 0.0, 0.0, 0
        self._arrived: deque[_Sequence] = deque()
        # (step after which it ends, number, sequence), a heap.
        self._running: list[tuple[int, int, _Sequence]] = []
        self._numbers = count()
        self._ended: list[_Sequence] = []
        # When those that ended leave, see `GATHER_S`.
        self._leaves = 0.0
        # Set when requests or versions have changed.
        self._changed = asyncio.Event()

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Begin requests with the next step."""
        self._advance()
        self._changed.set()
        for request in requests:
            length = self._lengths.draw(request.seed, request.max_new_tokens)
            self._arrived.append(_Sequence(request.id, [(0, self._version)], length))
        if not self._running:
            self._began = max(self._began, self._now())
            self._join()

    async def collect(self, patience_s: float) -> FinishedTurns:
        """Wait for answers that may leave, at most `patience_s`, and return them."""
        end = self._now() + patience_s
        while not (found := self.leaving()).ids and (left := end - self._now()) > 0:
            self._changed.clear()
            moment = self.next_event()
            await within(self._changed, left if moment is None else min(left, moment - self._now()))
        return found

    def leaving(self) -> FinishedTurns:
        """Take the answers that may leave now."""
        self._advance()
        leaving, busy = self._ended, self._running or self._arrived
        if not leaving or (busy and self._leaves > self._now() + _SAME_S):
            return FinishedTurns([], _NOTHING, self._stats())
        self._ended = []
        columns = PackedCompletions.pack([_completion(each) for each in leaving])
        ids = [each.id for each in leaving]
        return FinishedTurns(ids, columns, self._stats())

    def abort(self, ids: Sequence[RequestId]) -> int:
        """Forget requests; return how many tokens they had."""
        self._advance()
        self._changed.set()
        gone = set(ids)
        tokens = sum(self._sampled(each) for _, _, each in self._running if each.id in gone)
        tokens += sum(each.length for each in self._ended if each.id in gone)
        self._running = [entry for entry in self._running if entry[2].id not in gone]
        heapq.heapify(self._running)
        self._arrived = deque(each for each in self._arrived if each.id not in gone)
        self._ended = [each for each in self._ended if each.id not in gone]
        return tokens

    def change(self, version: int, pause: float) -> None:
        """Serve another version after a pause, in which nothing is sampled."""
        self._advance()
        self._changed.set()
        self._version, self._paused = version, self._paused + pause
        self._began = (self._began if self._running else self._now()) + pause
        for _, _, each in self._running:
            each.stretches.append((self._sampled(each), version))
        for each in self._arrived:
            each.stretches = [(0, version)]

    def next_event(self) -> float | None:
        """Return when an answer ends or leaves, or new ones join; None while there is nothing to do."""
        if not self._running:
            return self._now() if self._ended else None
        if self._ended:
            last = max(end for end, _, _ in self._running) - self._steps
            if self._began + last * self._cost.step(1) >= self._leaves:
                # More are running until then: it does not matter when one ends.
                return self._leaves
        steps = 1 if self._arrived and len(self._running) < self._at_a_time else self._running[0][0] - self._steps
        end = self._began + steps * self._cost.step(len(self._running))
        return min(end, self._leaves) if self._ended else end

    def _advance(self) -> None:
        """Make the steps that end until now."""
        while self._running:
            sequences = len(self._running)
            seconds = self._cost.step(sequences)
            possible = int((self._now() + _SAME_S - self._began) / seconds)
            if possible < 1:
                return
            joins = self._arrived and sequences < self._at_a_time
            steps = 1 if joins else min(possible, self._running[0][0] - self._steps)
            self._began, self._steps = self._began + steps * seconds, self._steps + steps
            self._busy, self._tokens = self._busy + steps * seconds, self._tokens + steps * sequences
            while self._running and self._running[0][0] == self._steps:
                self._leaves = self._leaves if self._ended else self._began + GATHER_S
                self._ended.append(heapq.heappop(self._running)[2])
            self._join()

    def _join(self) -> None:
        while self._arrived and len(self._running) < self._at_a_time:
            each = self._arrived.popleft()
            each.first = self._steps
            heapq.heappush(self._running, (each.first + each.length, next(self._numbers), each))

    def _stats(self) -> EngineStats:
        return EngineStats(self._busy, self._paused, self._tokens, self._steps, at=self._now())

    def _sampled(self, sequence: _Sequence) -> int:
        return self._steps - sequence.first


def _completion(sequence: _Sequence) -> Completion:
    length = sequence.length
    zeros = np.zeros(length, np.int32)
    return Completion(zeros, np.zeros(length, np.float32), token_versions(sequence.stretches, length), "stop")


@dataclass
class SimulatedWorker:
    """`Worker` with its engine in this process."""

    name: str
    engine: SimulatedEngine

    async def call(self, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> Any:
        answer = getattr(self.engine, method.__name__)(*arguments)
        return await answer if isawaitable(answer) else answer


@dataclass
class SimulatedPool:
    """`GeneratorPool`, as far as the dispatcher uses it, of engines that are never lost."""

    slots: list[SimulatedWorker]
    # Rollouts that an engine decodes at a time.
    at_a_time: int
    version: int = field(default=0, init=False)

    @property
    def engines(self) -> list[SimulatedWorker]:
        return self.slots

    def forget_gone(self) -> None:
        """Do nothing: none is gone."""

    def require_awake(self) -> None:
        """Do nothing: the loop lets engines sample while they are awake alone."""

    def sync(self, version: int, pause: float) -> None:
        """Bring every engine to a version."""
        for worker in self.slots:
            worker.engine.change(version, pause)
        self.version = version
