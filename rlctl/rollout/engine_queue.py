"""Queue of one engine: the turns that it samples, and two tasks: one sends it orders, one collects its answers."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rlctl.generation.engine import ENOUGH, GATHER_MOST_S, Engine, EngineStats, FinishedTurns
from rlctl.generation.requests import Completion, RequestId, RolloutId, ScoreRequest, TurnRequest
from rlctl.utils.event_loop import EventLoop, wait_until_set
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Worker

# A method of `Engine` that takes a list: `submit` takes requests, `abort` takes ids of requests.
Order = Callable[[Engine, list[Any]], int | None]
# Errors of a call after which the engine is lost: it must be replaced.
_LOSSES = (WorkerDied, WorkerError, WorkerTimeout)
_COLLECT_S = 1.0


@dataclass(eq=False, slots=True)
class SubmittedTurn:
    """One turn without an answer. It is PENDING while `queue` is None, then SAMPLING, and ABORTING once `stopped` is
    set."""

    request: TurnRequest | ScoreRequest
    # Cancelled when no player waits for the answer any more.
    answer: "asyncio.Future[Completion]"
    # True if the turn goes before all other turns that wait for an engine.
    ahead: bool = False
    # True if the turn's rollout may have further turns, until `RolloutDispatcher.finish`.
    turns_follow: bool = False
    # The engine that samples the turn.
    queue: "EngineQueue | None" = None
    # Done when the engine has confirmed the abort, or is lost.
    stopped: "asyncio.Future[None] | None" = None


@dataclass(frozen=True)
class EngineStatus:
    """State of one engine, as the dispatcher sees it."""

    name: str
    # Number of awaited turns.
    sampling: int
    # Number of aborted turns whose abort the engine has not confirmed.
    aborting: int
    # The most tokens that all of its turns may sample together.
    load: int
    # Seconds since the engine last did anything.
    silent_s: float
    # False from the engine's loss until it is replaced.
    is_live: bool


class EngineQueue:
    """One engine and its turns. Only the event loop uses it.

    index: slot in the pool. at_a_time: number of turns that the engine decodes at a time. changed: called when turns
    have ended, when the engine's capacity is known, or when the engine is lost.
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
        self.index = index
        self.worker = worker
        self._at_a_time = at_a_time
        self._deadline_s = deadline_s
        self._events = events
        self._note_change = changed
        # SAMPLING and ABORTING turns.
        self.turns: dict[RequestId, SubmittedTurn] = {}
        # The most tokens that these turns may sample together.
        self.load = 0
        # Batches of later turns of this engine's rollouts, which wait until the engine has room.
        self.waiting: deque[list[SubmittedTurn]] = deque()
        # Rollouts whose last turn was sampled here, until no further turn can follow.
        self.episodes: set[RolloutId] = set()
        self.stats = EngineStats()
        # Number of sampled tokens of aborted turns.
        self.aborted_tokens = 0
        # Time at which the engine last did anything.
        self.last_step = events.now()
        # Reason why the engine must be replaced; None while it is live.
        self.lost: Exception | None = None
        # Orders not sent yet: a method of `Engine` and its arguments.
        self._orders: deque[tuple[Order, list[Any]]] = deque()
        # Time since which the first order waits.
        self._orders_since = 0.0
        # Wakes the sending task, so that it looks at the orders again.
        self._hurry = asyncio.Event()
        self._is_sending = False
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._collect())

    def begin(self, turns: list[SubmittedTurn]) -> None:
        """Begin to sample turns on this engine."""
        for turn in turns:
            turn.queue = self
            self.turns[turn.request.id] = turn
            self.load += _most_tokens(turn.request)
        self.last_step = self._events.now()
        # The engines of a pool either sample or score.
        order: Order = Engine.score if isinstance(turns[0].request, ScoreRequest) else Engine.submit
        self._queue_order(order, [turn.request for turn in turns])

    async def abort(self, turn: SubmittedTurn) -> None:
        """Stop sampling a turn; return when the engine has confirmed the abort, or is lost."""
        if self.lost or self._is_closed:
            self._remove_turn(turn)
            return
        turn.stopped = self._events.loop.create_future()
        self._queue_order(Engine.abort, [turn.request.id])
        await turn.stopped

    def lose(self, error: Exception) -> None:
        """Note that the engine must be replaced. Remove its aborted turns; its other turns stay until `give_up`."""
        if self.lost:
            return
        self.lost = error
        # Nobody needs the aborted turns again. Their `abort` waits for a confirmation that this engine cannot give.
        aborted = [turn for turn in self.turns.values() if turn.answer.cancelled()]
        for turn in aborted:
            self._remove_turn(turn)
        self._note_change(self)

    def lose_if_silent(self) -> None:
        """Note that the engine must be replaced if it has turns and did nothing for `run.deadline_s`."""
        if self.turns and self._events.now() - self.last_step >= self._deadline_s:
            self.lose(WorkerTimeout("collect", [self.worker.name], self._deadline_s, "run.deadline_s"))

    def give_up(self) -> list[SubmittedTurn]:
        """Remove and return all turns of a lost engine, so that another engine begins them again."""
        turns = list(self.turns.values())
        for turn in turns:
            self._remove_turn(turn)
        return turns

    def status(self) -> EngineStatus:
        """Return the state of the engine."""
        sampling = sum(not turn.answer.cancelled() for turn in self.turns.values())
        return EngineStatus(
            name=self.worker.name,
            sampling=sampling,
            aborting=len(self.turns) - sampling,
            load=self.load,
            silent_s=self._events.now() - self.last_step,
            is_live=not self.lost,
        )

    def close(self) -> "set[asyncio.Task[None]]":
        """Stop answering turns and calling the engine; return the tasks whose calls have not ended yet."""
        self._is_closed = True
        self._hurry.set()
        return self._tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._events.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self) -> None:
        """Collect the engine's answers until it is lost."""
        while not self._is_closed and not self.lost:
            try:
                finished = await self.worker.call(self._deadline_s, Engine.collect, _COLLECT_S)
            except _LOSSES as error:
                self.lose(error)
            else:
                self._deliver_finished(finished)

    def _deliver_finished(self, finished: FinishedTurns) -> None:
        if finished.stats != self.stats:
            self.last_step = self._events.now()
        has_new_capacity = finished.stats.holds != self.stats.holds
        self.stats = finished.stats
        if self._is_closed or not (finished.ids or has_new_capacity):
            return
        for request_id, completion in zip(finished.ids, finished.columns.unpack()):
            turn = self.turns.get(request_id)
            if turn is None:
                continue
            if turn.answer.cancelled():
                self.aborted_tokens += len(completion.tokens)
            else:
                turn.answer.set_result(completion)
            # An ABORTING turn stays until the engine has confirmed the abort. Otherwise the same turn could be
            # submitted again before the engine gets the abort, which would then stop the new turn.
            if not turn.stopped:
                self._remove_turn(turn)
        self._hurry.set()
        self._note_change(self)

    def _queue_order(self, method: Order, arguments: list[Any]) -> None:
        """Queue an order, or add its arguments to the last order if both call the same method."""
        if not self._orders:
            self._orders_since = self._events.now()
        if self._orders and self._orders[-1][0] == method:
            self._orders[-1][1].extend(arguments)
        else:
            self._orders.append((method, arguments))
        self._hurry.set()
        if not self._is_sending:
            self._is_sending = True
            self._spawn(self._send_orders())

    async def _send_orders(self) -> None:
        """Send the queued orders to the engine, until none is left or the engine is lost."""
        while self._orders and not self.lost and not self._is_closed:
            seconds = self._gather_until() - self._events.now()
            if seconds > 0:
                self._hurry.clear()
                await wait_until_set(self._hurry, seconds)
                continue
            method, arguments = self._orders.popleft()
            self._orders_since = self._events.now()
            try:
                answer = await self.worker.call(self._deadline_s, method, arguments)
            except _LOSSES as error:
                self.lose(error)
                break
            if method is Engine.abort:
                self._confirm_aborts(arguments, answer or 0)
        self._is_sending = False

    def _gather_until(self) -> float:
        """Return the time until which the first order waits for further turns to submit.

        Gathering saves calls, which delay the engine's steps. It is done only if the engine has enough turns to decode.
        """
        method, arguments = self._orders[0]
        may_gather = method == Engine.submit and len(self._orders) == 1 and len(arguments) < ENOUGH
        surplus_turns = len(self.turns) - len(arguments) - self._at_a_time
        if may_gather and surplus_turns >= len(arguments):
            return self._orders_since + GATHER_MOST_S
        return self._orders_since

    def _confirm_aborts(self, aborted: list[RequestId], tokens: int) -> None:
        """Remove turns whose abort the engine has confirmed. tokens: number of their sampled tokens."""
        self.aborted_tokens += tokens
        for request_id in aborted:
            if turn := self.turns.get(request_id):
                self._remove_turn(turn)
        self._note_change(self)

    def _remove_turn(self, turn: SubmittedTurn) -> None:
        """Remove a turn after its answer, or after its abort was confirmed."""
        del self.turns[turn.request.id]
        self.load -= _most_tokens(turn.request)
        turn.queue = None
        if turn.stopped and not turn.stopped.done():
            turn.stopped.set_result(None)


def _most_tokens(request: TurnRequest | ScoreRequest) -> int:
    """Return the load of a request: the most tokens that an engine samples for it, or the tokens that it scores."""
    return len(request.tokens) if isinstance(request, ScoreRequest) else request.max_new_tokens
