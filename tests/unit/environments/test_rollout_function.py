"""Rollout functions in their process: requests, results, and problems."""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.coroutine_loop import CoroutineLoop
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.messages import (
    BeginFunction,
    CloseEpisode,
    EpisodeMessage,
    FunctionEnded,
    FunctionWaits,
    ResumeFunction,
    read_function_message,
)
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.environments.rollout_function import FunctionEpisode, FunctionPolicy

OWN = """
import asyncio, random

async def play(task, policy):
    tokens, log_probs, versions = await policy.sample(task.tokens)
    more = await policy.sample([*task.tokens, *tokens, 9])
    return {"sum": float(sum(more.tokens)), "first": log_probs[0] + versions[0]}

async def beside(task, policy):
    found = await asyncio.gather(*(policy.sample([each]) for each in task.row["starts"]))
    return float(sum(each.tokens[0] for each in found))

async def drawing(task, policy):
    await policy.sample([random.randint(0, 10**6)])

async def raising(task, policy):
    raise KeyError(task.answer)

async def wrong(task, policy):
    return "much"

async def hanging(task, policy):
    await asyncio.sleep(1000)

def plain(task, policy):
    return 1.0

async def alone(task):
    return 1.0
"""
TASK = {"id": "e0-r1", "prompt": "1+1=", "tokens": [1, 2], "answer": "2", "row": {"starts": [3, 4, 5]}}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def pool_of(own: Path) -> Iterator[Any]:
    pools = []

    def make(name: str, timeout_s: float = 120.0) -> EnvironmentPool:
        spec = EnvironmentSpec(f"{own}:{name}", timeout_s, is_function=True)
        pools.append(EnvironmentPool({"rollout": spec}, 2048, processes=1))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()


def asks(pool: EnvironmentPool, name: str, *answers: Any, waits: bool = False) -> Any:
    """Return the request of the function after these answers; None begins the call."""
    told = pool.resume(name, answers, waits=waits) if answers else pool.begin(name, TASK, 0)
    return told.result()


def turn(*tokens: int) -> Any:
    return list(tokens), [0.0] * len(tokens), [0] * len(tokens)


def test_it_asks_for_samples_and_returns_a_value(pool_of: Any) -> None:
    pool = pool_of("play")
    assert pool.contracts()["rollout"].problems == []
    assert asks(pool, "a") == asks(pool, "b") == FunctionWaits([[1, 2]], 0)
    assert asks(pool, "a", ([7, 8], [-0.5, -0.25], [3, 3])) == FunctionWaits([[1, 2, 7, 8, 9]], 1)
    end = asks(pool, "a", ([4, 5], [0.0, 0.0], [4, 4]))
    assert end == FunctionEnded(1, {"sum": 9.0, "first": 2.5})
    assert pool.close("a").result() is None and pool.close("b").result() is None


def test_samples_side_by_side_are_asked_for_together_and_have_no_deadline_while_they_are_sampled(
    pool_of: Any,
) -> None:
    pool = pool_of("beside", timeout_s=1.5)
    assert asks(pool, "a") == FunctionWaits([[3], [4], [5]], 0)
    waiting = pool.resume("a", [turn(10)], waits=True)
    with pytest.raises(TimeoutError):
        waiting.result(2)
    end = asks(pool, "a", turn(20), turn(30))
    assert waiting.result() == FunctionWaits([], 1)
    assert end == FunctionEnded(2, 60.0)


class Here:
    """Call of a function in this process, which the test answers."""

    loop = CoroutineLoop()

    def __init__(self, function: Any) -> None:
        self.told: dict[int, Future[Any]] = defaultdict(Future)
        self.actions = itertools.count()
        self.episode = FunctionEpisode(function, self.loop, lambda action, value: self.told[action].set_result(value))

    def act(self, message: EpisodeMessage) -> "Future[Any]":
        future = self.told[action := next(self.actions)]
        self.episode.submit(action, message)
        return future

    def asks(self, *answers: Any) -> Any:
        told = self.act(ResumeFunction(answers) if answers else BeginFunction("rollout", TASK, 0))
        return read_function_message(told.result(60))


def test_branches_ask_in_one_order_however_their_answers_come() -> None:
    async def branch(policy: FunctionPolicy, start: int) -> int:
        first = await policy.sample([start])
        for _ in range(start):  # branches do not take the same way through the event loop
            await asyncio.sleep(0)
        return (await policy.sample([start, *first.tokens])).tokens[0]

    async def function(task: Any, policy: FunctionPolicy) -> float:
        return float(sum(await asyncio.gather(*(branch(policy, each) for each in (30, 2, 9)))))

    def asked(*cuts: int) -> list[list[int]]:
        here, answers, begin = Here(function), [turn(10), turn(20), turn(30)], 0
        assert here.asks().samples == [[30], [2], [9]]
        found = []
        for cut in cuts:
            found += here.asks(*answers[begin:cut]).samples
            begin = cut
        assert here.asks(turn(1), turn(2), turn(3)).reward == 6.0
        return found

    assert asked(3) == asked(1, 2, 3) == asked(2, 3) == [[30, 10], [2, 20], [9, 30]]


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken() -> None:
    async def function(task: Any, policy: FunctionPolicy) -> float:
        begun = [asyncio.create_task(policy.sample([each])) for each in (3, 4, 5)]
        first, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        return float(first.pop().result().tokens[0])

    here = Here(function)
    here.asks()
    assert here.asks(turn(10), turn(20), turn(30)) == FunctionEnded(1, 10.0)


def test_what_is_asked_while_others_are_sampled_is_told_at_once() -> None:
    later = asyncio.Event()

    async def function(task: Any, policy: FunctionPolicy) -> None:
        async def after_a_while() -> None:
            await later.wait()
            await policy.sample([9])

        await asyncio.gather(policy.sample([1]), policy.sample([2]), after_a_while())

    here = Here(function)
    assert here.asks().samples == [[1], [2]]
    listening = here.act(ResumeFunction([]))
    here.loop.running.call_soon_threadsafe(later.set)
    assert read_function_message(listening.result(60)) == FunctionWaits([[9]], 0)
    listening = here.act(ResumeFunction([]))
    assert here.asks(turn(1), turn(2), turn(3)) == FunctionEnded(3, None)
    assert read_function_message(listening.result(60)) == FunctionWaits([], 0)


def test_who_asks_again_after_each_learned_that_a_budget_is_used_up_is_found_out() -> None:
    async def function(task: Any, policy: FunctionPolicy) -> None:
        while True:
            await asyncio.gather(policy.sample([1]), policy.sample([2]))

    here = Here(function)
    assert not here.asks().asks_again
    assert not here.asks(turn(1), None).asks_again
    assert here.asks(None, None) == FunctionWaits([[1], [2]], 2, asks_again=True)
    assert here.act(CloseEpisode()).result(60) is None


def test_an_error_of_a_callback_is_told_to_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def function(task: Any, policy: FunctionPolicy) -> None:
        await policy.sample([1])

    def broken(self: Any) -> None:
        raise LookupError("a defect")

    here = Here(function)
    monkeypatch.setattr(FunctionEpisode, "_answer_action", broken)
    failure = here.act(BeginFunction("rollout", TASK, 0)).result(60)
    assert isinstance(failure, EnvironmentFailure) and str(failure) == "function failed with LookupError: a defect"


def test_random_is_that_of_the_group(pool_of: Any) -> None:
    pool = pool_of("drawing")
    found = [pool.begin(name, TASK, seed).result() for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert found[0] == found[1] != found[2]
    assert found[0] == FunctionWaits([[random.Random(5).randint(0, 10**6)]], 0)
    assert asks(pool, "a", turn(1)) == FunctionEnded(1, None)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("raising", "raised", "own.py:17: '2'"),
        ("wrong", "contract", "the rollout function must return a finite number or a dict of them, not str 'much'"),
        ("hanging", "timeout", "begin took longer than 0.5 s"),
    ],
)
def test_what_goes_wrong_costs_that_rollout(pool_of: Any, name: str, kind: str, said: str) -> None:
    pool = pool_of(name, 120.0 if name != "hanging" else 0.5)
    pool.contracts()
    failure = pool.begin("a", TASK, 0).result()
    assert isinstance(failure, EnvironmentFailure) and failure.kind == kind and said in str(failure)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "must be `async def plain(task, policy)`, not a function"),
        ("alone", "is called as alone(task, policy): too many positional arguments"),
        ("none", "own.py has no none"),
    ],
)
def test_what_is_no_rollout_function_is_told_before_the_start(pool_of: Any, name: str, said: str) -> None:
    with pytest.raises(UnusableEnvironmentError, match="rollout: ") as error:
        pool_of(name).contracts()
    assert said in str(error.value)
