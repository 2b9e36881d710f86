"""The runner of rollouts raises defects. Stopping it ends its tasks, but environment actions may finish."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.utils.event_loop import EventLoop, done
from tests.waiting import until


class HeldEngines:
    """Stand-in for engines that answer, and confirm aborts, only when the test says so."""

    def __init__(self, events: EventLoop) -> None:
        self.events = events
        # (request, future of its answer).
        self.requests = list[tuple[TurnRequest, asyncio.Future[Completion]]]()
        self.aborted = list[RequestId]()
        self.confirm = asyncio.Event()

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        self.requests.append((request, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            await self.confirm.wait()
            raise

    def answer(self, version: int) -> None:
        """Answer the latest request."""
        completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.full(1, version, np.int32), "stop")
        _, answer = self.requests[-1]
        self.events.call(lambda: answer.set_result(completion))

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Do nothing, because no later turns follow."""


class CoroutinePlayer(Player):
    """Player that plays a rollout by a test's coroutine."""

    def __init__(self, play: Callable[[RolloutStart, Policy], Any]) -> None:
        self._play = play

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        rollout: Rollout = await self._play(start, policy)
        return rollout


@pytest.fixture
def events() -> Iterator[EventLoop]:
    loop = EventLoop("rollouts")
    yield loop
    loop.close()


START = RolloutStart(RolloutId("train", "r0", 0, 0), Task("r0", [1, 2], "", None), 4, 1.0, 0, 0)


def begin(runner: RolloutRunner) -> list[Rollout]:
    """Begin a rollout. Return a list to which it is added when it ends."""
    ended = list[Rollout]()
    runner.events.ask(lambda: runner.begin([START], ended.append))
    return ended


def test_a_stopped_rollout_has_ended_when_its_engine_has_confirmed_and_may_begin_again(events: EventLoop) -> None:
    engines = HeldEngines(events)
    runner = RolloutRunner(SingleTurnPlayer(), engines)
    ended = begin(runner)
    until(lambda: len(engines.requests) == 1)
    stopping = events.submit(runner.stop([START.id]))
    until(lambda: bool(engines.aborted))
    assert not stopping.done()
    events.call(engines.confirm.set)
    assert stopping.result(10) == [START.id]
    played_again = begin(runner)
    until(lambda: len(engines.requests) == 2)
    assert engines.requests[0][0] == engines.requests[1][0] and engines.aborted == [engines.requests[0][0].id]
    engines.answer(4)
    until(lambda: bool(played_again))
    assert played_again[0].sampled_versions.tolist() == [4] and not ended


def test_a_stop_waits_for_an_engine_that_hangs_no_longer_than_it_is_told_to(events: EventLoop) -> None:
    engines = HeldEngines(events)
    runner = RolloutRunner(SingleTurnPlayer(), engines)
    ended = begin(runner)
    until(lambda: len(engines.requests) == 1)
    assert events.run(runner.stop([START.id], 0.05)) == [START.id]
    assert engines.aborted == [engines.requests[0][0].id] and not ended
    runner.check()


def test_a_player_that_swallows_its_cancellation_is_a_defect(events: EventLoop) -> None:
    is_over = False

    async def wait_forever(start: RolloutStart, policy: Policy) -> Any:
        while not is_over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def sample_forever(start: RolloutStart, policy: Policy) -> Any:
        request = TurnRequest(RequestId(start.id), [1], 4, 1.0, 0)
        while True:
            with suppress(asyncio.CancelledError):
                return Rollout.from_turn(request, await policy.sample(request))

    for play in (wait_forever, sample_forever):
        engines = HeldEngines(events)
        engines.confirm.set()
        runner = RolloutRunner(CoroutinePlayer(play), engines)
        begin(runner)
        with pytest.raises(RuntimeError, match=r"the player of rollout .* swallows its cancellation"):
            if play is sample_forever:
                until(lambda engines=engines: bool(engines.requests))  # type: ignore[misc]
            events.run(runner.stop([START.id], 0.1))
            until(lambda runner=runner: bool(runner.check()))  # type: ignore[misc,func-returns-value]
    is_over = True


def test_a_stop_ends_the_tasks_and_leaves_an_action_to_its_end(events: EventLoop) -> None:
    action = Future[Any]()
    closed = list[str]()

    async def play(start: RolloutStart, policy: Policy) -> Any:
        try:
            await done(action)
        except asyncio.CancelledError:
            closed.append("closed")
            raise

    runner = RolloutRunner(CoroutinePlayer(play), HeldEngines(events))
    ended = begin(runner)
    assert events.run(runner.stop([START.id])) == [START.id]
    assert not action.cancelled() and closed in ([], ["closed"])
    action.set_result(None)
    assert not asyncio.all_tasks(events.loop) and not ended


def test_a_defect_of_a_player_is_raised_by_a_check(events: EventLoop) -> None:
    async def play(start: RolloutStart, policy: Policy) -> Any:
        raise KeyError("a defect")

    runner = RolloutRunner(CoroutinePlayer(play), HeldEngines(events))
    begin(runner)

    def check_raises() -> bool:
        try:
            runner.check()
        except KeyError:
            return True
        return False

    until(check_raises)


def test_a_loop_that_something_blocks_is_told_at_the_deadline(events: EventLoop) -> None:
    async def do_nothing() -> None:
        pass

    events.call(lambda: time.sleep(0.5))
    with pytest.raises(RuntimeError, match="the event loop did not answer for 0 s: something blocks it"):
        events.run(do_nothing(), 0.05)
    events.run(do_nothing())


def test_a_loop_that_enters_itself_is_told_at_once(events: EventLoop) -> None:
    async def do_nothing() -> None:
        pass

    with pytest.raises(RuntimeError, match="the event loop waits for itself"):
        events.ask(lambda: events.run(do_nothing()))


def test_a_thread_of_the_loop_hands_its_errors_on_also_one_that_ends_a_process(events: EventLoop) -> None:
    def fail() -> None:
        raise KeyError("a defect")

    def leave_process() -> None:
        raise SystemExit

    with pytest.raises(KeyError, match="a defect"):
        events.run(events.in_thread("scoring", fail))
    with pytest.raises(RuntimeError, match="a thread ended by SystemExit"):
        events.run(events.in_thread("scoring", leave_process))
