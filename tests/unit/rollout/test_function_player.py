"""Rollout functions: whatever they sample after, each sampled token trains exactly once, after just that."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rlctl.data.chat import Chat
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.generation.requests import RolloutId, turn_seed
from rlctl.rollout.function_player import FunctionPlayer
from rlctl.rollout.types import PlayedEpisode, Rollout
from tests.unit.data.conftest import tokenizer
from tests.unit.rollout.fake_engine import VirtualClock
from tests.unit.rollout.test_player import CHATML, LIMITS, ScriptedEngines, Taken, start

__all__ = ["tokenizer"]

Told = dict[str, Any] | EnvironmentFailure
TEXTS = ["7<|im_end|>", "", "true<eos>", "<think>cut in the midst of"]


@dataclass
class Function:
    """Rollout function in this process: `asks(what was sampled, None at first)` gives what it asks for next."""

    asks: Callable[[tuple[list[int], list[float], list[int]] | None], Told]

    def begin(self, episode: RolloutId, task: dict[str, Any], seed: int) -> "Future[Told]":
        return self._told(None)

    def resume(self, episode: RolloutId, sampled: tuple[list[int], list[float], list[int]]) -> "Future[Told]":
        return self._told(sampled)

    def close(self, episode: RolloutId) -> None:
        """Nothing to free."""

    def _told(self, sampled: tuple[list[int], list[float], list[int]] | None) -> "Future[Told]":
        future: Future[Told] = Future()
        future.set_result(self.asks(sampled))
        return future


def played(
    engines: ScriptedEngines, asks: Any, must_value: bool = False, **limits: Any
) -> tuple[Rollout, PlayedEpisode]:
    taken, own = Taken(), replace(LIMITS, **limits)
    arguments: Any = (engines, Function(asks), {}, engines.chat, own, None, VirtualClock(lambda: None))
    player = FunctionPlayer(*arguments)
    player.must_value, player.vocabulary = must_value, 1000
    player.play([start()], taken)
    for _ in range(200):
        player.play_next()
    (rollout,) = taken.rollouts
    assert rollout.episode
    return rollout, rollout.episode


def check_exact(rollout: Rollout, engines: ScriptedEngines) -> None:
    found = []
    for row in rollout.rows:
        assert row.sampled[-1] and (row.sampled == (row.turns >= 0)).all()
        for turn in sorted({*row.turns[row.sampled].tolist()}):
            at = np.flatnonzero(row.turns == turn)
            assert (np.diff(at) == 1).all() and (row.versions[at] == turn + 1).all()
            found.append((row.tokens[: at[0]].tolist(), row.tokens[at].tolist()))
    assert sorted(found) == sorted((request.prompt_tokens, tokens) for request, tokens in engines.asked if tokens)


@pytest.fixture
def engines(tokenizer: Any) -> ScriptedEngines:
    return ScriptedEngines(Chat(tokenizer, CHATML, None), lambda request: "7<|im_end|>")


def test_prompts_that_go_on_with_what_was_there_train_one_row(engines: ScriptedEngines) -> None:
    seen = [1, 2]

    def asks(sampled: Any) -> Told:
        if sampled:
            seen.extend([*sampled[0], 3])
        return {"sample": list(seen)} if len(engines.asked) < 5 else {"reward": 0.5}

    rollout, episode = played(engines, asks)
    check_exact(rollout, engines)
    assert len(rollout.rows) == 1 and (episode.turns, episode.ending, episode.reward) == (5, "done", 0.5)
    assert [each["role"] for each in episode.messages] == ["user", "assistant"] * 5 and episode.opening == 1
    assert [request.seed for request, _ in engines.asked] == [turn_seed(100, turn) for turn in range(5)]


def test_whatever_prompts_are_chosen_what_was_sampled_trains_once_after_what_it_was_sampled(tokenizer: Any) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        engines = ScriptedEngines(Chat(tokenizer, CHATML, None), lambda request, draw=draw: draw.choice(TEXTS))
        paths, turns = [[1, 2, 3]], draw.randint(1, 16)

        def asks(
            sampled: Any, draw: Any = draw, paths: Any = paths, turns: int = turns, engines: Any = engines
        ) -> Told:
            if sampled:
                paths.append([*engines.asked[-1][0].prompt_tokens, *sampled[0]])
                assert len(sampled[0]) == len(sampled[1]) == len(sampled[2])
            if len(engines.asked) == turns:
                return {"reward": {"won": 1.0}}
            path = draw.choice(paths)  # an earlier state again, its beginning, or the same and more
            cut = draw.choice([len(path), len(path), draw.randint(1, len(path))])
            return {"sample": [*path[:cut], *(draw.randint(4, 9) for _ in range(draw.choice([0, 2])))]}

        rollout, episode = played(engines, asks)
        check_exact(rollout, engines)
        assert episode.failure is None and episode.turns == turns


@pytest.mark.parametrize(("limits", "ending"), [({"max_turns": 2}, "max_turns"), ({"max_length": 8}, "max_length")])
def test_a_used_up_budget_gives_three_empty_lists_and_then_an_error(
    engines: ScriptedEngines, limits: dict[str, int], ending: str
) -> None:
    def asks(sampled: Any) -> Told:
        return {"reward": 1.0} if sampled == ([], [], []) else {"sample": [5] * (3 + 3 * len(engines.asked))}

    rollout, episode = played(engines, asks, **limits)
    assert (episode.ending, episode.reward, rollout.is_cut) == (ending, 1.0, True)
    check_exact(rollout, engines)
    rollout, episode = played(engines, lambda sampled: {"sample": [5] * 20}, **limits)
    assert episode.ending == "failed" and f"sampled again after {ending}" in str(episode.failure) and not rollout.rows


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sample": []}, "ids that are no tokens"),
        ({"sample": [1, 10**6]}, "ids that are no tokens"),
        ({"reward": 1.0}, "returned without a sample"),
        (EnvironmentFailure("raised", "begin raised KeyError"), "begin raised KeyError"),
    ],
)
def test_a_function_that_fails_leaves_its_rollout_out(engines: ScriptedEngines, asked: Told, said: str) -> None:
    rollout, episode = played(engines, lambda sampled: asked)
    assert said in str(episode.failure) and episode.reward is None and not rollout.rows


def test_a_function_may_leave_the_value_to_rewards_where_there_are_some(engines: ScriptedEngines) -> None:
    asks = lambda sampled: {"reward": None} if sampled else {"sample": [1]}  # noqa: E731
    assert played(engines, asks)[1].failure is None
    assert "nothing values the rollout" in str(played(engines, asks, must_value=True)[1].failure)


def test_a_failure_is_played_again_from_the_task_with_the_same_seeds(engines: ScriptedEngines) -> None:
    told = iter([{"sample": [1]}, EnvironmentFailure("died", "it died"), {"sample": [1]}, {"reward": 1.0}])
    rollout, episode = played(engines, lambda sampled: next(told), max_retries=1)
    assert (episode.failures, episode.reward, episode.turns) == (1, 1.0, 1)
    first, second = (request for request, _ in engines.asked)
    assert first == second and len(rollout.rows) == 1
