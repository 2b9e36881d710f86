"""Dispatcher: samples every turn of a run. It gives turns to engines with room, and returns the engines' answers.

    sample_turn -> PENDING -- engine has room --> SAMPLING -- answer --> returned
                      ^                            |    |
                      +------ engine is lost ------+    +-- cancelled --> ABORTING -- confirmed, or engine lost --> gone

The rollouts of a group go to one engine, where they share the cached prefix of their prompt. An engine gets no more new
rollouts than it decodes at a time, and one group ahead. The other turns are PENDING here, so that a free engine finds
work while another engine finishes its longest answers. A rollout's later turn goes before new groups, to the engine of
its previous turn, which has the prefix cached. For later turns an engine takes up to twice as many turns as it decodes
at a time: no other engine should take them, and turns that wait inside the engine begin without a round trip to the
driver. While turns wait inside an engine, it gets new turns in batches, up to 0.2 s later. A rollout that has ended
makes room at once, not only when its whole group has ended: of eight answers of log-normal lengths (sigma 1) the
longest is 3.1 times the mean, so that engines would be a third full.

In a synchronous run, an engine begins episodes (rollouts of several turns) until its cache is full, at most twice the
number that it decodes at a time. They advance together. Otherwise the episodes that begin last would be alone in the
engine at the end of the step. While environments are slow, the engine begins more episodes rather than decode fewer. An
asynchronous run does not do this: its steps overlap and have no such end, and an episode that ends early has younger
tokens.

Only the event loop uses the state. Each engine has one task that collects answers and one that sends orders, so no
engine waits for a hanging or slow one (to begin 512 rollouts of the tiny model takes 70 ms). An event costs the same
with any number of engines and turns. The training thread replaces engines, in `repair`, while it waits for rollouts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain

from rlctl.config.schema import RunSection
from rlctl.data.tasks import Task
from rlctl.generation.engine import EngineStats
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import Completion, RolloutId, ScoreRequest, TurnRequest
from rlctl.rollout.engine_queue import EngineQueue, EngineStatus, SubmittedTurn
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.turn_placement import TurnPlacement
from rlctl.rollout.types import Rollout, RolloutGroup, Sampling
from rlctl.rollout.wait_deadline import TICK_S, Emit, WaitDeadline
from rlctl.utils.event_loop import EventLoop, wait_until_set
from rlctl.workers.errors import WorkerDied

# `close` waits at most this long for running calls of engines. One call of `Engine.collect` takes less.
_CLOSE_S = 3.0


async def _ignore_restarts(rollouts: list[RolloutId]) -> None:
    """Do nothing."""


class RolloutDispatcher:
    """Samples turns on every engine of a pool.

    `sample_turn` and `finish` are called on the event loop, all other methods on the training thread.
    """

    def __init__(
        self,
        pool: GeneratorPool,
        run: RunSection,
        emit: Emit,
        events: EventLoop | None = None,
        *,
        waits_for_all: bool = False,
    ) -> None:
        """Begin to collect from the engines.

        events: loop on which rollouts are played; None: a new one, which `close` ends. waits_for_all: True if the
        caller waits until all submitted turns have ended, as in a synchronous step.
        """
        self._owns_events = events is None
        self.events = events or EventLoop("rollouts")
        self._pool = pool
        self._deadline_s = run.deadline_s
        self._wait_deadline = WaitDeadline(self.events.now, run, emit)
        # Called with the rollouts of lost engines, which continue on other engines.
        self.restarted: Callable[[list[RolloutId]], Awaitable[None]] = _ignore_restarts
        # Number of tokens in answers that came in the same iteration of the event loop as the abort of their turn.
        self._late_tokens = 0
        self._closed = False
        # Turns that were submitted in this iteration of the event loop.
        self._new_turns: list[SubmittedTurn] = []
        self._placement = TurnPlacement(pool.at_a_time, waits_for_all=waits_for_all)
        # Set when an engine has no turns left, or is lost.
        self._emptied = asyncio.Event()
        # Wakes a wait of the training thread. Set by the callbacks of the wait, and when an engine is lost.
        self.news = asyncio.Event()
        # True from the loss of an engine until `repair`.
        self.has_lost = False
        pool.forget_gone()
        # One queue for each slot of the pool.
        self._queues: list[EngineQueue] = []
        # Queues of replaced engines, whose last calls may not have ended yet.
        self._replaced: list[EngineQueue] = []
        self.events.ask(lambda: self._queues.extend(self._open_queue(index) for index in range(len(pool.engines))))

    # On the event loop.

    async def sample_turn(
        self, request: TurnRequest | ScoreRequest, *, ahead: bool = False, turns_follow: bool = False
    ) -> Completion:
        """Sample a turn, or score given tokens if the engines score. Turns of one loop iteration are placed together.

        ahead: the turn goes before all PENDING ones except later turns. turns_follow: the rollout may have further
        turns, until `finish`. Raises RuntimeError while the engines are asleep. A cancelled call ends when the engine
        has confirmed the abort or is lost.
        """
        turn = SubmittedTurn(request, self.events.loop.create_future(), ahead, turns_follow)
        if not self._new_turns:
            self.events.loop.call_soon(self._place_new_turns)
        self._new_turns.append(turn)
        try:
            return await turn.answer
        except asyncio.CancelledError:
            await self._abort(turn)
            raise

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Note that these rollouts have no further turns: their engines may begin other rollouts."""
        self._placement.finish(rollouts)

    def _place_new_turns(self) -> None:
        """Place the turns that were submitted in this iteration of the event loop: each begins or waits."""
        turns = [turn for turn in self._new_turns if not turn.answer.done()]
        self._new_turns = []
        try:
            self._pool.require_awake()
        except RuntimeError as error:
            for turn in turns:
                turn.answer.set_exception(error)
        else:
            self._placement.add(turns)

    async def _abort(self, turn: SubmittedTurn) -> None:
        """Stop sampling a cancelled turn; wait until its engine has confirmed the abort, or is lost."""
        if turn.queue:
            await turn.queue.abort(turn)
        elif not turn.answer.cancelled() and not turn.answer.exception():
            # The answer came in the iteration in which the rollout was cancelled.
            self._late_tokens += len(turn.answer.result().tokens)

    def _open_queue(self, index: int) -> EngineQueue:
        """Return a new queue for the engine in a slot, and begin to collect the engine's answers. index: the slot."""
        worker = self._pool.slots[index]
        assert worker
        queue = EngineQueue(index, worker, self._pool.at_a_time, self._deadline_s, self.events, self._note_change)
        self._note_change(queue)
        return queue

    def _note_change(self, queue: EngineQueue) -> None:
        if queue.lost:
            self.has_lost = True
            self.news.set()
        if not queue.turns or queue.lost:
            self._emptied.set()
        self._placement.note_change(queue)

    # On the training thread.

    def sample(
        self, runner: RolloutRunner, sampling: Sampling, tasks: Sequence[Task], version: int, first_place: int = 0
    ) -> list[RolloutGroup]:
        """Sample one group for each task, ahead of all PENDING turns; return the groups in the order of the tasks.

        runner: plays the rollouts with these engines. first_place: index of the first task among the
        `sampling.groups_per_step` tasks of this version. Seeds depend on this index.
        Engines that are lost meanwhile are replaced. Raises RuntimeError when nothing was sampled for
        `run.deadline_s`, or when `generation.max_restarts` are used up.
        """
        first_group = version * sampling.groups_per_step + first_place
        groups = [sampling.starts(task, number) for number, task in enumerate(tasks, first_group)]
        num_rollouts = sum(map(len, groups))
        ended: dict[RolloutId, Rollout] = {}

        def note_ended(rollout: Rollout) -> None:
            ended[rollout.id] = rollout
            self._wait_deadline.note_progress()
            if len(ended) == num_rollouts:
                self.news.set()

        async def wait_a_tick() -> bool:
            """Wait until all rollouts ended, an engine is lost, or TICK_S is over; return True if all ended."""
            end = self.events.now() + TICK_S
            while len(ended) < num_rollouts and not self.has_lost:
                self.news.clear()
                if not await wait_until_set(self.news, end - self.events.now()):
                    break
            return len(ended) == num_rollouts

        self._wait_deadline.note_progress()
        runner.check()
        self.events.run(runner.begin_groups(groups, note_ended, ahead=True))
        while not self.events.run(wait_a_tick()):
            runner.check()
            if self.repair():
                # The time of the replacement must not count as a silence of the new engine.
                self._wait_deadline.note_progress()
            self._wait_deadline.check(
                max(self.last_step(), runner.last_step),
                lambda: f"{sampling.purpose} waits for {num_rollouts - len(ended)} rollouts; {self.describe()}",
            )
        return [RolloutGroup(task, [ended[start.id] for start in starts]) for task, starts in zip(tasks, groups)]

    def drain(self, seconds: float = 0.0) -> bool:
        """Begin no more turns until `resume`. Wait up to `seconds` until no live engine has a turn.

        Return False if turns are still being sampled after that time.
        """
        self.events.check()
        return self.events.run(self._wait_until_drained(seconds))

    def resume(self) -> None:
        """Allow turns to begin again, after a refit. Turns of engines that the refit replaced restart from token 0."""
        self.events.run(self._resume())

    def repair(self) -> bool:
        """Replace engines that are lost or silent, and restart their turns. Return True if an engine was replaced.

        Call it only while the trainer has the weights of the pool's version. Raises RuntimeError when
        `generation.max_restarts` are used up.
        """
        self.events.check()
        lost = self.events.run(self._take_lost())
        if lost:
            # Engines that have sampled no token: an equal error of two such engines ends the run.
            early = [index for index in lost if not self._queues[index].stats.tokens]
            self._pool.replace(lost, early)
            self.events.run(self._adopt_replaced())
        return bool(lost)

    @property
    def aborted_tokens(self) -> int:
        """Number of sampled tokens of all turns aborted so far."""
        return self._late_tokens + sum(queue.aborted_tokens for queue in chain(self._queues, self._replaced))

    def engines(self) -> list[EngineStatus]:
        """Return the state of every engine."""
        return self.events.ask(lambda: [queue.status() for queue in self._queues])

    def describe(self) -> str:
        """Return a text on the state of every engine, to explain why a run waits."""
        parts = [
            f"{status.name} samples {status.sampling} rollouts, silent for {status.silent_s:.0f} s"
            for status in self.engines()
        ]
        num_pending = self.events.ask(lambda: self._placement.count_pending(self._queues))
        parts.append(f"{num_pending} rollouts not begun")
        return "; ".join(parts)

    def stats(self) -> list[EngineStats]:
        """Return the totals of each engine as of its last answer to `Engine.collect`, at most a second ago."""
        return [queue.stats for queue in self._queues]

    def last_step(self) -> float:
        """Return the time at which any engine last did something, by the event loop's clock."""
        return max(queue.last_step for queue in self._queues)

    def close(self) -> None:
        """Stop answering turns and calling engines, for good.

        A Ray call that is in progress while Ray shuts down ends the whole process without a message (Ray 2.60: "The
        core worker has already been shutdown"), and a saved run would exit with 1. An engine that does not answer is
        therefore killed.
        """
        if self._closed:
            return
        self._closed = True
        if not self.events.run(self._wait_for_calls()):
            self._pool.kill()
            self.events.run(self._wait_for_calls())
        self.events.ask(lambda: [queue.give_up() for queue in self._queues])
        if self._owns_events:
            self.events.close()

    async def _wait_until_drained(self, seconds: float) -> bool:
        self._placement.is_paused = True
        end = self.events.now() + seconds
        while True:
            self._lose_silent()
            self._emptied.clear()
            if not any(queue.turns and not queue.lost for queue in self._queues):
                return True
            if not await wait_until_set(self._emptied, end - self.events.now()):
                return False

    async def _resume(self) -> None:
        await self._adopt_replaced()
        self._placement.resume(self._queues)

    def _lose_silent(self) -> None:
        for queue in self._queues:
            queue.lose_if_silent()

    async def _take_lost(self) -> dict[int, Exception]:
        """Adopt engines that a refit has replaced. Return the slots of lost engines, each with the reason."""
        await self._adopt_replaced()
        self._lose_silent()
        self.has_lost = False
        return {queue.index: queue.lost for queue in self._queues if queue.lost and self._is_current(queue)}

    def _is_current(self, queue: EngineQueue) -> bool:
        return self._pool.slots[queue.index] is queue.worker

    async def _adopt_replaced(self) -> None:
        """Open queues for new engines, by `repair` or a refit, and restart the turns of the engines they replaced."""
        turns: list[SubmittedTurn] = []
        old_queues = [queue for queue in self._queues if not self._is_current(queue)]
        for queue in old_queues:
            has_successor = self._pool.slots[queue.index] is not None
            reason = "another engine has replaced it" if has_successor else "its node is gone"
            # No effect if the queue has its reason already, as after `repair`.
            queue.lose(WorkerDied("collect", [queue.worker.name], reason))
            turns += queue.give_up()
            if has_successor:
                self._replaced.append(queue)
                self._queues[queue.index] = self._open_queue(queue.index)
        self._placement.add_restarted(turns)
        if turns:
            await self.restarted([*dict.fromkeys(turn.request.id.rollout for turn in turns)])

    async def _wait_for_calls(self) -> bool:
        """Wait until no engine is being called, at most `_CLOSE_S`; return True if none is being called."""
        self._placement.is_paused = True
        calls: set[asyncio.Task[None]] = set()
        for queue in [*self._queues, *self._replaced]:
            calls |= queue.close()
        # `asyncio.wait` refuses an empty set.
        if not calls:
            return True
        _, unfinished = await asyncio.wait(calls, timeout=_CLOSE_S)
        return not unfinished
