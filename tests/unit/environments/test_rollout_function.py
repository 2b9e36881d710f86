"""Rollout functions in a child process: their requests, results and errors."""

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
    second_turn = await policy.sample([*task.tokens, *tokens, 9])
    return {"sum": float(sum(second_turn.tokens)), "first": log_probs[0] + versions[0]}

async def beside(task, policy):
    turns = await asyncio.gather(*(policy.sample([start]) for start in task.row["starts"]))
    return float(sum(turn.tokens[0] for turn in turns))

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
def own_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def open_pool(own_functions: Path) -> Iterator[Any]:
    """Return a function that opens a pool of a rollout function, by its name in `OWN`."""
    pools = []

    def open_pool_of(name: str, timeout_s: float = 120.0) -> EnvironmentPool:
        spec = EnvironmentSpec(f"{own_functions}:{name}", timeout_s, is_function=True)
        pool = EnvironmentPool({"rollout": spec}, 2048, processes=1)
        pools.append(pool)
        return pool

    yield open_pool_of
    for pool in pools:
        pool.shutdown()


def advance_call(pool: EnvironmentPool, name: str, *answers: Any) -> Any:
    """Begin a call of the function or resume it with `answers`. Return its next requests, or its result if it ended."""
    if answers:
        return pool.resume(name, answers, waits=False).result()
    return pool.begin(name, TASK, 0).result()


def make_turn(*tokens: int) -> Any:
    return list(tokens), [0.0] * len(tokens), [0] * len(tokens)


def test_it_asks_for_samples_and_returns_a_value(open_pool: Any) -> None:
    pool = open_pool("play")
    assert pool.contracts()["rollout"].problems == []
    assert advance_call(pool, "a") == advance_call(pool, "b") == FunctionWaits([[1, 2]], 0)
    assert advance_call(pool, "a", ([7, 8], [-0.5, -0.25], [3, 3])) == FunctionWaits([[1, 2, 7, 8, 9]], 1)
    end = advance_call(pool, "a", ([4, 5], [0.0, 0.0], [4, 4]))
    assert end == FunctionEnded(1, {"sum": 9.0, "first": 2.5})
    assert pool.close("a").result() is None and pool.close("b").result() is None


def test_samples_side_by_side_are_asked_for_together_and_have_no_deadline_while_they_are_sampled(
    open_pool: Any,
) -> None:
    pool = open_pool("beside", timeout_s=1.5)
    assert advance_call(pool, "a") == FunctionWaits([[3], [4], [5]], 0)
    first_resume = pool.resume("a", [make_turn(10)], waits=True)
    with pytest.raises(TimeoutError):
        first_resume.result(2)
    end = advance_call(pool, "a", make_turn(20), make_turn(30))
    assert first_resume.result() == FunctionWaits([], 1)
    assert end == FunctionEnded(2, 60.0)


class LocalCall:
    """A call of a function in this process, which the test answers."""

    loop = CoroutineLoop()

    def __init__(self, function: Any) -> None:
        self.replies: dict[int, Future[Any]] = defaultdict(Future)
        self.actions = itertools.count()
        self.episode = FunctionEpisode(function, self.loop, self._note_reply)

    def submit(self, message: EpisodeMessage) -> "Future[Any]":
        action = next(self.actions)
        reply = self.replies[action]
        self.episode.submit(action, message)
        return reply

    def advance(self, *answers: Any) -> Any:
        """Begin the call, or resume it with these answers; return its next requests or its end."""
        message = ResumeFunction(answers) if answers else BeginFunction("rollout", TASK, 0)
        return read_function_message(self.submit(message).result(60))

    def _note_reply(self, action: int, reply: Any) -> None:
        self.replies[action].set_result(reply)


def test_branches_ask_in_one_order_however_their_answers_come() -> None:
    async def branch(policy: FunctionPolicy, start: int) -> int:
        first_turn = await policy.sample([start])
        for _ in range(start):  # branches do not take the same way through the event loop
            await asyncio.sleep(0)
        second_turn = await policy.sample([start, *first_turn.tokens])
        return second_turn.tokens[0]

    async def function(task: Any, policy: FunctionPolicy) -> float:
        return float(sum(await asyncio.gather(branch(policy, 30), branch(policy, 2), branch(policy, 9))))

    def collect_second_prompts(*cuts: int) -> list[list[int]]:
        """Answer the first prompts in parts that end at these cuts; return the prompts of the second turns."""
        call = LocalCall(function)
        answers = [make_turn(10), make_turn(20), make_turn(30)]
        assert call.advance().samples == [[30], [2], [9]]
        prompts = []
        begin = 0
        for cut in cuts:
            prompts += call.advance(*answers[begin:cut]).samples
            begin = cut
        assert call.advance(make_turn(1), make_turn(2), make_turn(3)).reward == 6.0
        return prompts

    expected_prompts = [[30, 10], [2, 20], [9, 30]]
    for cuts in ((3,), (1, 2, 3), (2, 3)):
        assert collect_second_prompts(*cuts) == expected_prompts


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken() -> None:
    async def function(task: Any, policy: FunctionPolicy) -> float:
        samples = [asyncio.create_task(policy.sample([start])) for start in (3, 4, 5)]
        done, _ = await asyncio.wait(samples, return_when=asyncio.FIRST_COMPLETED)
        return float(done.pop().result().tokens[0])

    call = LocalCall(function)
    call.advance()
    assert call.advance(make_turn(10), make_turn(20), make_turn(30)) == FunctionEnded(1, 10.0)


def test_what_is_asked_while_others_are_sampled_is_told_at_once() -> None:
    may_ask = asyncio.Event()

    async def function(task: Any, policy: FunctionPolicy) -> None:
        async def ask_later() -> None:
            await may_ask.wait()
            await policy.sample([9])

        await asyncio.gather(policy.sample([1]), policy.sample([2]), ask_later())

    call = LocalCall(function)
    assert call.advance().samples == [[1], [2]]
    listening = call.submit(ResumeFunction([]))
    call.loop.running.call_soon_threadsafe(may_ask.set)
    assert read_function_message(listening.result(60)) == FunctionWaits([[9]], 0)
    listening = call.submit(ResumeFunction([]))
    assert call.advance(make_turn(1), make_turn(2), make_turn(3)) == FunctionEnded(3, None)
    assert read_function_message(listening.result(60)) == FunctionWaits([], 0)


def test_who_asks_again_after_each_learned_that_a_budget_is_used_up_is_found_out() -> None:
    async def function(task: Any, policy: FunctionPolicy) -> None:
        while True:
            await asyncio.gather(policy.sample([1]), policy.sample([2]))

    call = LocalCall(function)
    assert not call.advance().asks_again
    assert not call.advance(make_turn(1), None).asks_again
    assert call.advance(None, None) == FunctionWaits([[1], [2]], 2, asks_again=True)
    assert call.submit(CloseEpisode()).result(60) is None


def test_an_error_of_a_callback_is_told_to_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def function(task: Any, policy: FunctionPolicy) -> None:
        await policy.sample([1])

    def raise_defect(self: Any) -> None:
        raise LookupError("a defect")

    call = LocalCall(function)
    monkeypatch.setattr(FunctionEpisode, "_answer_action", raise_defect)
    failure = call.submit(BeginFunction("rollout", TASK, 0)).result(60)
    assert isinstance(failure, EnvironmentFailure) and str(failure) == "function failed with LookupError: a defect"


def test_random_is_that_of_the_group(open_pool: Any) -> None:
    pool = open_pool("drawing")
    request = pool.begin("a", TASK, 5).result()
    assert request == pool.begin("b", TASK, 5).result() != pool.begin("c", TASK, 6).result()
    assert request == FunctionWaits([[random.Random(5).randint(0, 10**6)]], 0)
    assert advance_call(pool, "a", make_turn(1)) == FunctionEnded(1, None)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raising", "raised", "own.py:17: '2'"),
        ("wrong", "contract", "the rollout function must return a finite number or a dict of them, not str 'much'"),
        ("hanging", "timeout", "begin took longer than 0.5 s"),
    ],
)
def test_what_goes_wrong_costs_that_rollout(open_pool: Any, name: str, kind: str, message: str) -> None:
    pool = open_pool(name, 120.0 if name != "hanging" else 0.5)
    pool.contracts()
    failure = pool.begin("a", TASK, 0).result()
    assert isinstance(failure, EnvironmentFailure) and failure.kind == kind and message in str(failure)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "must be `async def plain(task, policy)`, not a function"),
        ("alone", "is called as alone(task, policy): too many positional arguments"),
        ("none", "own.py has no none"),
    ],
)
def test_what_is_no_rollout_function_is_told_before_the_start(open_pool: Any, name: str, message: str) -> None:
    with pytest.raises(UnusableEnvironmentError, match="rollout: ") as error:
        open_pool(name).contracts()
    assert message in str(error.value)
