"""The runner of rollouts: groups stay together, defects are raised, aborts end tasks and leave actions to their end."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
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
from tests.unit.rollout.test_player import Taken
from tests.waiting import until


class Held:
    """Engines that answer when they are told to."""

    def __init__(self) -> None:
        self.calls, self.aborted = list[list[TurnRequest]](), list[RequestId]()

    def submit(
        self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False, more: bool = False
    ) -> None:
        self.calls.append([*requests])

    def finish(self, rollouts: Collection[RolloutId]) -> None:
        """Nothing follows."""

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        self.aborted += ids
        return [*ids]


class Plays(Player):
    """Player that is a coroutine of a test."""

    def __init__(self, play: Callable[[RolloutStart, Policy], Any]) -> None:
        self._play = play

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        found: Rollout = await self._play(start, policy)
        return found


@pytest.fixture
def events() -> Iterator[EventLoop]:
    loop = EventLoop("rollouts")
    yield loop
    loop.close()


def starts(groups: int, rollouts: int) -> list[RolloutStart]:
    ids = [RolloutId("train", "r0", group, index) for group in range(groups) for index in range(rollouts)]
    return [RolloutStart(each, Task("r0", [1, 2], "", None), 4, 1.0, each.index, 0) for each in ids]


def answer(version: int) -> Completion:
    return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.full(1, version, np.int32), "stop")


def test_first_turns_that_begin_together_are_submitted_together_in_order(events: EventLoop) -> None:
    engines, taken, begun = Held(), Taken(), starts(3, 4)
    runner = RolloutRunner(SingleTurnPlayer(), engines, events)
    runner.begin(begun, taken)
    until(lambda: bool(engines.calls))
    (requests,) = engines.calls
    assert [each.id.rollout for each in requests] == [each.id for each in begun]
    runner.completed([(each, answer(0)) for each in requests])
    until(lambda: len(taken.rollouts) == 12)
    assert [each.id for each in taken.rollouts] == [each.id for each in begun]


def test_an_answer_to_an_aborted_request_is_not_that_of_a_later_one_with_equal_ids(events: EventLoop) -> None:
    engines, taken, begun = Held(), Taken(), starts(1, 1)
    runner = RolloutRunner(SingleTurnPlayer(), engines, events)
    runner.begin(begun, taken)
    until(lambda: len(engines.calls) == 1)
    assert runner.abort([begun[0].id]) == [begun[0].id]
    runner.begin(begun, taken)
    until(lambda: len(engines.calls) == 2)
    (old,), (new,) = engines.calls
    assert old == new and engines.aborted == [old.id]
    runner.completed([(old, answer(3))])
    runner.completed([(new, answer(4))])
    until(lambda: bool(taken.rollouts))
    assert taken.rollouts[0].sampled_versions.tolist() == [4]


def test_a_lost_engine_is_hidden_from_the_player_and_told_to_the_taker(events: EventLoop) -> None:
    engines, taken = Held(), Taken()
    runner = RolloutRunner(SingleTurnPlayer(), engines, events)
    runner.begin(starts(1, 2), taken)
    until(lambda: bool(engines.calls))
    runner.restarted(engines.calls[0])
    assert taken.again == [(each.id, True) for each in starts(1, 2)] and not taken.rollouts


def test_an_abort_ends_the_tasks_and_leaves_an_action_to_its_end(events: EventLoop) -> None:
    action, ended = Future[Any](), list[str]()

    async def play(start: RolloutStart, policy: Policy) -> Any:
        try:
            await done(action)
        except asyncio.CancelledError:
            ended.append("closed")
            raise

    runner, taken = RolloutRunner(Plays(play), Held(), events), Taken()
    runner.begin(starts(1, 1), taken)
    assert runner.abort([starts(1, 1)[0].id]) == [starts(1, 1)[0].id]
    assert not action.cancelled() and ended in ([], ["closed"])
    action.set_result(None)
    assert not asyncio.all_tasks(events.loop) and not taken.rollouts


def test_a_defect_of_a_player_is_raised_by_whoever_calls_next(events: EventLoop) -> None:
    async def play(start: RolloutStart, policy: Policy) -> Any:
        raise KeyError("a defect")

    runner = RolloutRunner(Plays(play), Held(), events)
    runner.begin(starts(1, 1), Taken())

    def raises() -> bool:
        try:
            runner.check()
        except KeyError:
            return True
        return False

    until(raises)
    with pytest.raises(KeyError, match="a defect"):
        runner.begin(starts(1, 1), Taken())


def test_a_loop_that_something_blocks_is_told_at_the_deadline(events: EventLoop) -> None:
    async def nothing() -> None:
        pass

    events.call(lambda: time.sleep(0.5))
    with pytest.raises(RuntimeError, match="the event loop did not answer for 0 s: something blocks it"):
        events.run(nothing(), 0.05)
    events.run(nothing())
