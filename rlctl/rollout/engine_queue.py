"""Queue of one engine: its turns, and its tasks for orders and answers."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rlctl.generation.engine import ENOUGH, GATHER_MOST_S, Engine, EngineStats, FinishedTurns
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.utils.event_loop import EventLoop, within
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Worker

Order = Callable[[Engine, list[Any]], int | None]
_LOST = (WorkerDied, WorkerError, WorkerTimeout)
_COLLECT_S = 1.0


@dataclass(eq=False, slots=True)
class SubmittedTurn:
    """One turn on its way. It is PENDING without an engine, SAMPLING with one, and ABORTING with `stopped`."""

    request: TurnRequest
    # Cancelled when nobody waits any more.
    answer: "asyncio.Future[Completion]"
    # It comes before all that wait for an engine.
    ahead: bool = False
    # Turns of its rollout may follow, until `RolloutDispatcher.finish`.
    more: bool = False
    queue: "EngineQueue | None" = None
    # Done when the engine has confirmed the abort, or is lost.
    stopped: "asyncio.Future[None] | None" = None


@dataclass(frozen=True)
class EngineStatus:
    """State of one engine, as the dispatcher sees it."""

    name: str
    # Awaited turns, and aborted ones that the engine has not confirmed.
    sampling: int
    aborting: int
    # Most tokens of these turns.
    load: int
    # Seconds since it last did anything.
    silent_s: float
    # False once it is lost, until it is replaced.
    is_live: bool


class EngineQueue:
    """One engine and its turns. It belongs to the event loop.

    index: slot in the pool. at_a_time: turns that it decodes. changed: called when turns have ended, when its capacity
    is known, or when it is lost.
    """

    def __init__(
        self,
        index: int,
        worker: Worker,
        at_a_time: int,
        deadline_s: float,
        events: EventLoop,
        changed: "Callable[[EngineQueue], None]",
    ) -> None:
        self.index, self.worker = index, worker
        self._at_a_time, self._deadline_s, self._events, self._changed = at_a_time, deadline_s, events, changed
        # SAMPLING and ABORTING ones, and the tokens that they may have.
        self.turns: dict[RequestId, SubmittedTurn] = {}
        self.load = 0
        # Later turns of its rollouts that wait until it has room.
        self.waiting: deque[list[SubmittedTurn]] = deque()
        # Rollouts begun here with turns to follow.
        self.episodes: set[RolloutId] = set()
        self.stats = EngineStats()
        # Sampled tokens of aborted turns.
        self.aborted_tokens = 0
        # When it last did anything.
        self.last = events.now()
        # Why it must be replaced.
        self.lost: Exception | None = None
        # Methods and arguments not sent yet, and since when the first one waits.
        self._orders: deque[tuple[Order, list[Any]]] = deque()
        self._ordered = 0.0
        # Set when the orders may gather no longer.
        self._hurry = asyncio.Event()
        self._sends = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._collect())

    def begin(self, turns: list[SubmittedTurn]) -> None:
        """Sample turns."""
        for turn in turns:
            turn.queue, self.turns[turn.request.id] = self, turn
            self.load += turn.request.max_new_tokens
        self.last = self._events.now()
        self._order(Engine.submit, [turn.request for turn in turns])

    async def abort(self, turn: SubmittedTurn) -> None:
        """Stop sampling a turn; return when the engine has confirmed, or is lost."""
        if self.lost or self._closed:
            self._give_up(turn)
            return
        turn.stopped = self._events.loop.create_future()
        self._order(Engine.abort, [turn.request.id])
        await turn.stopped

    def lose(self, error: Exception) -> None:
        """Note that the engine must be replaced. Turns that were aborted are gone; others stay until `give_up`."""
        if self.lost:
            return
        self.lost = error
        for turn in [each for each in self.turns.values() if each.answer.cancelled()]:
            self._give_up(turn)
        self._changed(self)

    def lose_if_silent(self) -> None:
        """Note that the engine must be replaced if it has turns and did nothing for `run.deadline_s`."""
        if self.turns and self._events.now() - self.last >= self._deadline_s:
            self.lose(WorkerTimeout("collect", [self.worker.name], self._deadline_s, "run.deadline_s"))

    def give_up(self) -> list[SubmittedTurn]:
        """Take the turns of a lost engine, to begin them again."""
        turns = list(self.turns.values())
        for turn in turns:
            self._give_up(turn)
        return turns

    def status(self) -> EngineStatus:
        """Return the state of the engine."""
        sampling = sum(not each.answer.cancelled() for each in self.turns.values())
        silent = self._events.now() - self.last
        return EngineStatus(
            self.worker.name, sampling, len(self.turns) - sampling, self.load, silent, is_live=not self.lost
        )

    def close(self) -> "set[asyncio.Task[None]]":
        """Answer no turn and call the engine no more; return the tasks that call it still."""
        self._closed = True
        self._hurry.set()
        return self._tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._events.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self) -> None:
        """Collect the engine's answers until it is lost."""
        while not self._closed and not self.lost:
            try:
                finished = await self.worker.call(self._deadline_s, Engine.collect, _COLLECT_S)
            except _LOST as error:
                self.lose(error)
            else:
                self._deliver_finished(finished)

    def _deliver_finished(self, finished: FinishedTurns) -> None:
        if finished.stats != self.stats:
            self.last = self._events.now()
        learns, self.stats = finished.stats.holds != self.stats.holds, finished.stats
        if self._closed or not (finished.ids or learns):
            return
        for name, completion in zip(finished.ids, finished.columns.unpack()):
            if (turn := self.turns.get(name)) is None:
                continue
            if turn.answer.cancelled():
                self.aborted_tokens += len(completion.tokens)
            else:
                turn.answer.set_result(completion)
            # One that is ABORTING stays until the engine confirms: the order must not reach it when it begins again.
            if not turn.stopped:
                self._give_up(turn)
        self._hurry.set()
        self._changed(self)

    def _order(self, method: Order, what: list[Any]) -> None:
        """Queue an order; join it to the one before if that is of its kind."""
        if not self._orders:
            self._ordered = self._events.now()
        if self._orders and self._orders[-1][0] == method:
            self._orders[-1][1].extend(what)
        else:
            self._orders.append((method, what))
        self._hurry.set()
        if not self._sends:
            self._sends = True
            self._spawn(self._send())

    async def _send(self) -> None:
        """Send the engine its orders while there are any."""
        while self._orders and not self.lost and not self._closed:
            if (left := self._gathers() - self._events.now()) > 0:
                self._hurry.clear()
                await within(self._hurry, left)
                continue
            method, what = self._orders.popleft()
            self._ordered = self._events.now()
            try:
                answer = await self.worker.call(self._deadline_s, method, what)
            except _LOST as error:
                self.lose(error)
                break
            if method is Engine.abort:
                self._confirm(what, answer or 0)
        self._sends = False

    def _gathers(self) -> float:
        """Return the time until which the first order waits for others like it.

        Only an engine that has more turns than it decodes is made to wait: each call takes time of its steps.
        """
        (method, what), *others = self._orders
        waits = method == Engine.submit and not others and len(what) < ENOUGH
        spare = len(self.turns) - len(what) - self._at_a_time
        return self._ordered + (GATHER_MOST_S if waits and spare >= len(what) else 0.0)

    def _confirm(self, aborted: list[RequestId], tokens: int) -> None:
        """Give up turns whose abort the engine has confirmed. tokens: sampled ones of these turns."""
        self.aborted_tokens += tokens
        for each in aborted:
            if turn := self.turns.get(each):
                self._give_up(turn)
        self._changed(self)

    def _give_up(self, turn: SubmittedTurn) -> None:
        """Give a turn up: it was answered, or its abort was confirmed."""
        del self.turns[turn.request.id]
        self.load -= turn.request.max_new_tokens
        turn.queue = None
        if turn.stopped and not turn.stopped.done():
            turn.stopped.set_result(None)
