"""Runner of rollouts: one asyncio task each, on the event loop of the driver, between players and the dispatcher.

    begin -> task -- policy.sample --> engines -- completed --> task goes on ... -- returns --> RolloutTaker.ended
                                                                 \
                                                                  +-- abort --> cancelled, its turns stopped

Turns that rollouts ask for in one iteration of the loop are submitted together, so that a group's first turns go to one
engine. Rollouts that end in one iteration are handed out together.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.rollout.policy import Player
from rlctl.rollout.types import Rollout, RolloutStart, RolloutTaker
from rlctl.utils.event_loop import EventLoop

# Seconds in which cancelled rollouts end. Nothing in them waits.
_CLOSE_S = 3.0


class Engines(Protocol):
    """Interface that a runner needs of `RolloutDispatcher`."""

    def submit(
        self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False, more: bool = False
    ) -> None:
        """Sample requests."""

    def finish(self, rollouts: Collection[RolloutId]) -> None:
        """Learn that no turn of these rollouts follows."""

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        """Stop sampling requests."""


@dataclass(eq=False)
class AskedTurn:
    """One turn that a rollout waits for."""

    rollout: "RunningRollout"
    request: TurnRequest
    answer: "asyncio.Future[Completion]"


@dataclass(eq=False)
class RunningRollout:
    """One rollout in flight; its player's `Policy`."""

    runner: "RolloutRunner"
    start: RolloutStart
    taker: RolloutTaker
    # Its turns come before all that wait for an engine.
    ahead: bool
    task: "asyncio.Task[None]" = field(init=False)
    # Turns that it waits for.
    asked: dict[RequestId, AskedTurn] = field(default_factory=dict)
    # Tokens of the turns that have ended in this try.
    sampled: int = 0

    async def sample(self, request: TurnRequest) -> Completion:
        if request.id.turn == 0:
            self.sampled = 0
        turn = AskedTurn(self, request, asyncio.get_running_loop().create_future())
        self.asked[request.id] = turn
        self.runner.ask(turn)
        try:
            return await turn.answer
        finally:
            del self.asked[request.id]
            if turn.answer.done() and not turn.answer.cancelled() and not turn.answer.exception():
                self.sampled += len(turn.answer.result().tokens)


class RolloutRunner:
    """Plays rollouts with a dispatcher's engines. Methods are called from any thread but the event loop's own.

    events: loop of the player's environments; None: a new one, which `close` ends.
    """

    def __init__(self, player: Player, engines: Engines, events: EventLoop | None = None) -> None:
        self._player, self._engines = player, engines
        self.events, self._owns_events = events or EventLoop("rollouts"), events is None
        # Tokens of turns that had ended, of rollouts that were aborted, so far.
        self.aborted_tokens = 0
        self._closed = False
        self._last_step = 0.0
        # Below here everything belongs to the loop's thread.
        self._running: dict[RolloutId, RunningRollout] = {}
        # Turns that were asked for, and rollouts that ended, in this iteration of the loop.
        self._asked: list[AskedTurn] = []
        self._ended: list[tuple[RunningRollout, Rollout]] = []

    def begin(self, starts: Sequence[RolloutStart], taker: RolloutTaker, *, ahead: bool = False) -> None:
        """Begin rollouts; `taker` gets each as it ends. ahead: before all that wait for an engine.

        Raises the first defect of a rollout, see `check`.
        """
        self.check()
        if starts and not self._closed:
            self.events.run(self._begin([RunningRollout(self, start, taker, ahead) for start in starts]))

    def abort(self, ids: Collection[RolloutId]) -> list[RolloutId]:
        """Stop these rollouts; none of them is handed out afterwards. Returns those that had not ended.

        Waits for the engines to confirm, see `RolloutDispatcher.abort`. Raises the first defect of a rollout.
        """
        self.check()
        stopped, requests = self.events.run(self._stop(ids))
        self._engines.abort(requests)
        self._engines.finish(stopped)
        return stopped

    def check(self) -> None:
        """Raise the first defect of a rollout or of an environment's action, if there was one."""
        self.events.check()

    @property
    def last_step(self) -> float:
        """When a rollout last did anything, by the event loop's clock."""
        return max(self._last_step, self._player.last_step)

    def describe(self) -> str:
        """Return the waits of rollouts for anything but engines, for a human; empty if there are none."""
        return self._player.describe()

    def close(self) -> None:
        """Stop all rollouts, and hand out nothing from now on."""
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # a loop that something blocks: the run ends all the same
            self.events.run(self._stop_all(), _CLOSE_S)
        if self._owns_events:
            self.events.close()

    def completed(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        """Take sampled turns, see `engine_queue.Submitter`."""
        self.events.call(partial(self._answered, answers))

    def restarted(self, requests: list[TurnRequest]) -> None:
        """Tell the takers of these rollouts that their turns are sampled again; earlier turns stay."""
        for taker, rollouts in self.events.run(self._takers(requests)):
            taker.restarted(rollouts, afresh=not self._player.several_turns)

    # All that follows runs on the loop.

    def ask(self, turn: AskedTurn) -> None:
        """Have a turn submitted, with all that are asked for in this iteration of the loop."""
        self._flush_soon()
        self._asked.append(turn)

    async def _begin(self, rollouts: list[RunningRollout]) -> None:
        for rollout in rollouts:
            self._running[rollout.start.id] = rollout
            rollout.task = self.events.spawn(self._play(rollout))

    async def _play(self, rollout: RunningRollout) -> None:
        ended = await self._player.play(rollout.start, rollout)
        self._flush_soon()
        self._ended.append((rollout, ended))

    async def _stop(self, ids: Iterable[RolloutId]) -> tuple[list[RolloutId], list[RequestId]]:
        """Cancel rollouts and wait until they have ended; return them, and the turns that they waited for."""
        stopped = [self._running.pop(each) for each in ids if each in self._running]
        turns = [request for rollout in stopped for request in rollout.asked]
        for rollout in stopped:
            rollout.task.cancel()
        if stopped:
            await asyncio.wait([rollout.task for rollout in stopped])
        self.aborted_tokens += sum(rollout.sampled for rollout in stopped)
        return [rollout.start.id for rollout in stopped], turns

    async def _stop_all(self) -> None:
        await self._stop(list(self._running))

    async def _takers(self, requests: list[TurnRequest]) -> list[tuple[RolloutTaker, list[RolloutId]]]:
        """Return the rollouts of these requests, by who began them."""
        lost = dict.fromkeys(each.id.rollout for each in requests)
        rollouts = [self._running[each] for each in lost if each in self._running]
        takers = dict.fromkeys(rollout.taker for rollout in rollouts)
        return [(taker, [each.start.id for each in rollouts if each.taker is taker]) for taker in takers]

    def _answered(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        self._last_step = self.events.now()
        for request, completion in answers:
            rollout = self._running.get(request.id.rollout)
            turn = rollout and rollout.asked.get(request.id)
            # An answer to a request of equal ids, which was aborted, is nobody's.
            if turn and turn.request.id is request.id and not turn.answer.done():
                turn.answer.set_result(completion)

    def _flush_soon(self) -> None:
        if not self._asked and not self._ended:
            self.events.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Submit the turns, and hand out the rollouts, of the iteration before."""
        asked, self._asked, ended, self._ended = self._asked, [], self._ended, []
        wanted = [each for each in asked if not each.answer.done()]
        for ahead, batch in groupby(wanted, lambda each: each.rollout.ahead):
            self._submit(list(batch), ahead)
        # One that was aborted since is handed out no more.
        own = [each for each in ended if self._running.get(each[0].start.id) is each[0]]
        for rollout, _ in own:
            del self._running[rollout.start.id]
        if own and self._player.several_turns:
            self._engines.finish([rollout.start.id for rollout, _ in own])
        for taker in dict.fromkeys(rollout.taker for rollout, _ in own):
            taker.ended([each for rollout, each in own if rollout.taker is taker])

    def _submit(self, turns: list[AskedTurn], ahead: bool) -> None:
        requests = [each.request for each in turns]
        try:
            self._engines.submit(requests, self, ahead=ahead, more=self._player.several_turns)
        except Exception as error:  # engines that sleep: a defect of each rollout
            for each in turns:
                each.answer.set_exception(error)
