"""Hostile turns and answers: an episode goes on or fails by itself, and an error of the pool is raised, never lost."""

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import Chat
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentSpec, ToolResult
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.runner import RolloutRunner
from tests.unit.data.conftest import CHATML, tokenizer
from tests.unit.data.test_turn_link import TOOLS
from tests.unit.environments.test_hostile import OWN
from tests.unit.rollout.test_player import LIMITS, ScriptedEngines, ScriptedPool, begin, go_on, play, player_of, start

__all__ = ["tokenizer"]


def test_an_error_of_the_pool_is_raised_to_whoever_plays_on(tokenizer: Any) -> None:
    chat = Chat(tokenizer, CHATML, None)
    pool = ScriptedPool(lambda kind, payload: None)
    refused: Future[Any] = Future()
    refused.set_exception(RecursionError("a defect"))
    pool.reset = lambda *_: refused  # type: ignore[method-assign]
    player = player_of(chat, ScriptedEngines(chat, None), pool)
    begin(player, start())
    go_on(player)
    with pytest.raises(RecursionError, match="a defect"):
        player.check()


def test_messages_that_the_template_refuses_fail_their_own_episode(tokenizer: Any) -> None:
    template = "{% if messages[0].role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}" + CHATML
    chat = Chat(tokenizer, template, None)
    odd = [{"role": "odd", "content": "x"}]
    pool = ScriptedPool(lambda kind, payload: odd if kind == "reset" else None)
    player = player_of(chat, ScriptedEngines(chat, None), pool)
    ended = begin(player, start(messages=[]))
    go_on(player)
    player.check()
    assert "refuses the messages of this episode: TemplateError: no such role" in str(ended[0].episode)


DEEP = '<tool_call>\n{"name": "echo", "arguments": {"value": ' + "[" * 500 + "]" * 500 + "}}\n</tool_call><|im_end|>"


def test_a_call_of_500_levels_is_answered_and_its_episode_goes_on(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    chat = Chat(tokenizer, CHATML, None)
    turns = iter([DEEP, "well<|im_end|>"])
    with EnvironmentPool({"game": EnvironmentSpec(f"{tmp_path}/own.py:Own", 60.0)}, 2048, 1) as pool:
        contracts = pool.contracts()
        engines = ScriptedEngines(chat, lambda request: next(turns), events=pool.events)
        player = RolloutRunner(EnvironmentPlayer(pool, contracts, chat, LIMITS, "hermes"), engines)
        ended = begin(player, start(turn=5_000))
        for _ in range(3000):
            player.check()
            if ended:
                break
            time.sleep(0.02)
        player.close()
    episode = ended[0].episode
    assert episode and (episode.ending, episode.tool_calls, episode.tool_errors) == ("answered", 1, 1)
    assert episode.messages[-2]["content"] == (
        "Error: no tool was called: arguments of 'echo' are nested too deep: at most 64 levels are allowed"
    )


def test_a_turn_that_looks_like_a_call_is_answered_and_does_not_end_the_episode(tokenizer: Any) -> None:
    chat = Chat(tokenizer, TOOLS, None)
    bare = '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    turns = iter([bare, "it is 4<|im_end|>"])

    def acts(kind: str, payload: Any) -> Any:
        if kind != "call":
            return None
        return [ToolResult("", call.error, failed=True) for call in payload]

    pool = ScriptedPool(acts)
    _, episode = play(chat, ScriptedEngines(chat, lambda request: next(turns)), pool, False, turn=200)
    assert (episode.ending, episode.turns, episode.tool_errors, episode.malformed_calls) == ("answered", 2, 1, 1)
    assert episode.messages[2]["content"].startswith("JSON that names add, and no whole call; a call is JSON with name")


@pytest.mark.parametrize("history", ["keep", "strip"])
def test_half_of_a_character_in_an_answer_fails_its_own_episode(tokenizer: Any, history: Any) -> None:
    chat = Chat(tokenizer, CHATML, None)
    pool = ScriptedPool(lambda kind, payload: "\ud83d" if kind == "step" else None)
    engines = ScriptedEngines(chat, lambda request: "well<|im_end|>")
    player = player_of(chat, engines, pool, limits=replace(LIMITS, history=history))
    ended = begin(player, start())
    go_on(player)
    player.check()
    assert "half of a character, which no tokenizer takes" in str(ended[0].episode)
