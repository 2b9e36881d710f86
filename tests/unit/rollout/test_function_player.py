"""Rollout functions: after any prompt, each sampled token trains exactly once, after exactly this prompt."""

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rlctl.data.chat import Chat
from rlctl.environments.environment_pool import POOL_CLOSED
from rlctl.environments.messages import (
    BeginFunction,
    CloseEpisode,
    FunctionEnded,
    FunctionWaits,
    ResumeFunction,
    read_function_message,
)
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.environments.rollout_function import FunctionPolicy
from rlctl.generation.requests import RolloutId, TurnRequest, turn_seed
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.players.function import FunctionPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import PlayedEpisode, Rollout
from rlctl.workers.user_logs import FailureLog
from tests.unit.data.conftest import tokenizer
from tests.unit.environments.test_rollout_function import LocalCall
from tests.unit.rollout.test_player import CHATML, LIMITS, ScriptedEngines, begin, go_on, start, stop
from tests.virtual_events import VirtualEvents

__all__ = ["tokenizer"]

Action = dict[str, Any] | EnvironmentFailure
TEXTS = ["7<|im_end|>", "", "true<eos>", "<think>cut in the midst of"]


@dataclass
class Function:
    """Rollout function in this process: `asks(samples, None at first)` gives its next request."""

    asks: Callable[[tuple[list[int], list[float], list[int]] | None], Action]
    # Three empty lists were given.
    refused: int = 0
    failures: FailureLog = field(default_factory=lambda: FailureLog("environment"))

    def begin(self, episode: RolloutId, task: dict[str, Any], seed: int) -> "Future[Any]":
        return self._outcome(self.asks(None), 0)

    def resume(self, episode: RolloutId, answers: list[Any], *, waits: bool) -> "Future[Any]":
        assert len(answers) == 1 and not waits, "one sample at a time"
        self.refused += answers[0] is None
        return self._outcome(self.asks(answers[0] or ([], [], [])), 1)

    def close(self, episode: RolloutId) -> None:
        """Nothing to free."""

    def check(self) -> None:
        """Nothing goes wrong in this process."""

    def _outcome(self, action: Action, num_taken: int) -> "Future[Any]":
        future: Future[Any] = Future()
        if isinstance(action, dict) and "sample" in action:
            future.set_result(FunctionWaits([action["sample"]], num_taken, bool(self.refused)))
        elif isinstance(action, dict):
            future.set_result(FunctionEnded(num_taken, action["reward"]))
        else:
            future.set_result(action)
        return future


def player_of(
    engines: Any, pool: Any, limits: EpisodeLimits = LIMITS, must_value: bool = False, vocabulary: int = 1 << 31
) -> RolloutRunner:
    engines.events = pool.events = VirtualEvents()
    return RolloutRunner(FunctionPlayer(pool, engines.chat, limits, must_value, vocabulary), engines)


def play(engines: ScriptedEngines, asks: Any, must_value: bool = False, **limits: Any) -> tuple[Rollout, PlayedEpisode]:
    player = player_of(engines, Function(asks), replace(LIMITS, **limits), must_value, 1000)
    ended = begin(player, start())
    go_on(player)
    (rollout,) = ended
    assert rollout.episode
    return rollout, rollout.episode


def check_exact(rollout: Rollout, engines: ScriptedEngines) -> None:
    trained = []
    for row in rollout.rows:
        assert row.sampled[-1] and (row.sampled == (row.turns >= 0)).all()
        for turn in sorted({*row.turns[row.sampled].tolist()}):
            places = np.flatnonzero(row.turns == turn)
            assert (np.diff(places) == 1).all() and (row.versions[places] == turn + 1).all()
            trained.append((row.tokens[: places[0]].tolist(), row.tokens[places].tolist()))
    assert sorted(trained) == sorted((request.prompt_tokens, tokens) for request, tokens in engines.answered if tokens)


@pytest.fixture
def engines(tokenizer: Any) -> ScriptedEngines:
    return ScriptedEngines(Chat(tokenizer, CHATML, None), lambda request: "7<|im_end|>")


def test_prompts_that_go_on_with_what_was_there_train_one_row(engines: ScriptedEngines) -> None:
    prompt = [1, 2]

    def asks(sampled: Any) -> Action:
        if sampled:
            prompt.extend([*sampled[0], 3])
        return {"sample": list(prompt)} if len(engines.answered) < 5 else {"reward": 0.5}

    rollout, episode = play(engines, asks)
    check_exact(rollout, engines)
    assert len(rollout.rows) == 1 and (episode.turns, episode.ending, episode.reward) == (5, "done", 0.5)
    assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 5 and episode.opening == 1
    assert [request.seed for request, _ in engines.answered] == [turn_seed(100, turn) for turn in range(5)]


def test_whatever_prompts_are_chosen_what_was_sampled_trains_once_after_what_it_was_sampled(tokenizer: Any) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        engines = ScriptedEngines(Chat(tokenizer, CHATML, None), lambda request, draw=draw: draw.choice(TEXTS))
        paths = [[1, 2, 3]]
        turns = draw.randint(1, 16)

        def asks(
            sampled: Any, draw: Any = draw, paths: Any = paths, turns: int = turns, engines: Any = engines
        ) -> Action:
            if sampled:
                paths.append([*engines.answered[-1][0].prompt_tokens, *sampled[0]])
                assert len(sampled[0]) == len(sampled[1]) == len(sampled[2])
            if len(engines.answered) == turns:
                return {"reward": {"won": 1.0}}
            path = draw.choice(paths)  # an earlier state again, its beginning, or the same and more
            cut = draw.choice([len(path), len(path), draw.randint(1, len(path))])
            added = [draw.randint(4, 9) for _ in range(draw.choice([0, 2]))]
            return {"sample": path[:cut] + added}

        rollout, episode = play(engines, asks)
        check_exact(rollout, engines)
        assert episode.failure is None and episode.turns == turns


@pytest.mark.parametrize(("limits", "ending"), [({"max_turns": 2}, "max_turns"), ({"max_length": 8}, "max_length")])
def test_a_used_up_budget_gives_three_empty_lists_and_then_an_error(
    engines: ScriptedEngines, limits: dict[str, int], ending: str
) -> None:
    def asks(sampled: Any) -> Action:
        return {"reward": 1.0} if sampled == ([], [], []) else {"sample": [5] * (3 + 3 * len(engines.answered))}

    rollout, episode = play(engines, asks, **limits)
    assert (episode.ending, episode.reward, rollout.is_cut) == (ending, 1.0, True)
    check_exact(rollout, engines)
    rollout, episode = play(engines, lambda sampled: {"sample": [5] * 20}, **limits)
    assert episode.ending == "failed" and f"sampled again after {ending}" in str(episode.failure) and not rollout.rows


@pytest.mark.parametrize(
    ("action", "failure"),
    [
        ({"sample": []}, "after an empty list: a prompt needs a token"),
        ({"sample": [1, 10**6]}, "ids that are no tokens"),
        ({"reward": 1.0}, "returned without a sample"),
        (EnvironmentFailure("raised", "begin raised KeyError"), "begin raised KeyError"),
    ],
)
def test_a_function_that_fails_leaves_its_rollout_out(engines: ScriptedEngines, action: Action, failure: str) -> None:
    rollout, episode = play(engines, lambda sampled: action)
    assert failure in str(episode.failure) and episode.reward is None and not rollout.rows


def test_what_the_player_finds_wrong_is_told_once_and_counted_by_its_cause(engines: ScriptedEngines) -> None:
    warnings: list[str] = []
    function = Function(lambda sampled: {"reward": 1.0})
    function.failures = FailureLog("environment", emit=lambda kind, **fields: warnings.append(fields["what"]))
    player = player_of(engines, function, LIMITS)
    begin(player, start(0), start(1))
    go_on(player)
    assert function.failures.most_common().startswith("rollout: the rollout function returned without a sample (")
    assert len(warnings) == 1 and "left out and counted" in warnings[0]


def test_a_function_may_leave_the_value_to_rewards_where_there_are_some(engines: ScriptedEngines) -> None:
    asks = lambda sampled: {"reward": None} if sampled else {"sample": [1]}  # noqa: E731
    assert play(engines, asks)[1].failure is None
    assert "nothing values the rollout" in str(play(engines, asks, must_value=True)[1].failure)


def test_a_failure_is_played_again_from_the_task_with_the_same_seeds(engines: ScriptedEngines) -> None:
    actions = iter([{"sample": [1]}, EnvironmentFailure("died", "it died"), {"sample": [1]}, {"reward": 1.0}])
    rollout, episode = play(engines, lambda sampled: next(actions), max_retries=1)
    assert (episode.failures, episode.reward, episode.turns) == (1, 1.0, 1)
    ((first, _), (second, _)) = engines.answered
    assert first == second and len(rollout.rows) == 1


@dataclass
class HeldEngines(ScriptedEngines):
    """Engines that answer a request when they are told to."""

    # Events that let the engines answer, by turn.
    waiting: dict[int, asyncio.Event] = field(default_factory=dict)
    # Most turns that waited at a time.
    most_waiting: int = 0

    async def wait_to_answer(self, request: TurnRequest) -> None:
        assert request.id.turn not in self.waiting, "it is being sampled already"
        may_answer = asyncio.Event()
        self.waiting[request.id.turn] = may_answer
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        try:
            await may_answer.wait()
        finally:
            self.waiting.pop(request.id.turn, None)

    def answer(self, turn: int) -> None:
        self.events.ask(self.waiting.pop(turn).set)


class Coroutine:
    """Rollout function in this process that is a coroutine, as in a child process."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def begin(self, episode: RolloutId, task: dict[str, Any], seed: int) -> "Future[Any]":
        self.call = LocalCall(self.function)
        return self._read_message(self.call.submit(BeginFunction("rollout", task, seed)))

    def resume(self, episode: RolloutId, answers: list[Any], *, waits: bool) -> "Future[Any]":
        return self._read_message(self.call.submit(ResumeFunction(answers)))

    def check(self) -> None:
        """Nothing goes wrong in this process."""

    def close(self, episode: RolloutId) -> None:
        self.call.submit(CloseEpisode())

    def _read_message(self, action: "Future[Any]") -> "Future[Any]":
        future: Future[Any] = Future()

        def hand_on(done: "Future[Any]") -> None:
            has_failed = isinstance(done.result(), EnvironmentFailure)
            future.set_result(done.result() if has_failed else read_function_message(done.result()))

        action.add_done_callback(hand_on)
        return future


async def search(task: Any, policy: FunctionPolicy) -> float:
    """Go on after three concurrent beginnings, and once more after the best one."""

    async def branch(start: int) -> list[int]:
        first = await policy.sample([1, start])
        path = [1, start, *first.tokens]
        second = await policy.sample([*path, 5])
        return [*path, *second.tokens]

    paths = await asyncio.gather(*map(branch, (3, 4, 3)))
    last = await policy.sample(max(paths))
    return float(len(last.tokens))


def settle(player: RolloutRunner) -> bool:
    """Let all that may happen without an engine happen; return True if anything did."""
    time.sleep(0.002)  # the function runs on another thread
    return player.events.step()  # type: ignore[attr-defined,no-any-return]


def play_coroutine(
    chat: Chat, function: Any, order: Callable[[Any], int], **limits: Any
) -> tuple[Rollout, HeldEngines]:
    """Play a function. order: chooses the turn that ends next among those in flight."""
    engines = HeldEngines(chat, lambda request: f"{request.seed % 97}<|im_end|>")
    player = player_of(engines, Coroutine(function), replace(LIMITS, **limits))
    ended = begin(player, start())
    end = time.monotonic() + 300
    while not ended and time.monotonic() < end:
        if not settle(player) and engines.waiting:
            engines.answer(order(engines.waiting))
    (rollout,) = ended
    return rollout, engines


def draw_order(seed: int) -> Callable[[Any], int]:
    draw = random.Random(seed)
    return lambda turns: draw.choice(list(turns))


def facts(rollout: Rollout, engines: HeldEngines) -> Any:
    assert rollout.episode
    rows = [(row.tokens.tolist(), row.sampled.tolist(), row.turns.tolist()) for row in rollout.rows]
    requests = sorted((request.id.turn, request.seed, request.prompt_tokens) for request, _ in engines.answered)
    return rows, requests, rollout.episode.messages, rollout.episode.reward, rollout.episode.ending


def test_samples_side_by_side_are_sampled_side_by_side_and_whichever_ends_first_all_is_the_same(tokenizer: Any) -> None:
    chat = Chat(tokenizer, CHATML, None)
    rollout, engines = play_coroutine(chat, search, min)
    assert engines.most_waiting == 3 and rollout.episode and rollout.episode.turns == 7
    seeds = {request.id.turn: request.seed for request, _ in engines.answered}
    assert seeds == {turn: turn_seed(100, turn) for turn in range(7)}
    for order in (max, *map(draw_order, range(5))):
        assert facts(*play_coroutine(chat, search, order)) == facts(rollout, engines)


def test_a_budget_ends_the_same_branch_whichever_sample_ends_first(tokenizer: Any) -> None:
    chat = Chat(tokenizer, CHATML, None)
    rollout, engines = play_coroutine(chat, search, min, max_turns=5)
    assert facts(rollout, engines) == facts(*play_coroutine(chat, search, max, max_turns=5))
    assert rollout.episode and (rollout.episode.turns, rollout.episode.ending) == (5, "max_turns")


def test_a_call_that_fails_is_made_again_when_nothing_is_sampled_for_it_any_more(tokenizer: Any) -> None:
    calls = []

    async def function(task: Any, policy: FunctionPolicy) -> float:
        calls.append(task)
        samples = [asyncio.create_task(policy.sample([1, token])) for token in (2, 3, 4)]
        await samples[0]
        if len(calls) == 1:
            raise ValueError("once")
        return float(len(await asyncio.gather(*samples)))

    rollout, engines = play_coroutine(Chat(tokenizer, CHATML, None), function, min, max_retries=1)
    assert rollout.episode and (rollout.episode.failures, rollout.episode.reward) == (1, 3.0)
    requests = [request for request, _ in engines.answered]
    assert requests[:3] == requests[3:] and [request.id.turn for request in requests[:3]] == [0, 1, 2]


def test_no_further_try_begins_once_the_pool_is_closed(engines: ScriptedEngines) -> None:
    actions: list[Action] = [{"sample": [1, 2]}, POOL_CLOSED]
    _, episode = play(engines, lambda answer: actions.pop(0), max_retries=9)
    assert (episode.failures, episode.failure) == (1, "the pool was closed")


def test_what_a_function_did_not_wait_for_trains_nothing(tokenizer: Any) -> None:
    async def function(task: Any, policy: FunctionPolicy) -> float:
        samples = [asyncio.create_task(policy.sample([1, token])) for token in (2, 3, 4)]
        await asyncio.wait(samples, return_when=asyncio.FIRST_COMPLETED)
        return 1.0

    for order in (min, max):
        rollout, engines = play_coroutine(Chat(tokenizer, CHATML, None), function, order)
        assert rollout.episode and rollout.episode.turns == len(rollout.rows) == 1 and not engines.waiting
        assert rollout.rows[0].tokens[:2].tolist() == [1, 2]


def test_a_stop_aborts_all_samples_of_a_call(tokenizer: Any) -> None:
    engines = HeldEngines(Chat(tokenizer, CHATML, None), lambda request: "7<|im_end|>")
    player = player_of(engines, Coroutine(search))
    ended = begin(player, start())
    while len(engines.waiting) < 3:
        settle(player)
    assert stop(player, start().id) == [start().id]
    assert sorted(request_id.turn for request_id in engines.aborted) == [0, 1, 2] and not engines.waiting
    go_on(player)
    assert not ended and not asyncio.all_tasks(player.events.loop)
