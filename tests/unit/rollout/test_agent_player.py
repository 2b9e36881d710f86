"""Agents in their process, played by the policy: trained ids are sampled ids, and a failure is no value."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.config.environment_schema import AgentSection
from rlctl.data.chat import Chat, ChatSpec
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec, command_of
from rlctl.generation.requests import TurnRequest
from rlctl.grpo.metrics import environment_metrics
from rlctl.rollout.players.agent import AgentPlayer, agent_notes, most_agents
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import PlayedEpisode, Rollout, RolloutGroup
from rlctl.utils.devices import usable_cores
from tests.unit.data.conftest import tokenizer
from tests.unit.environments.agents.served import END, TOOLED
from tests.unit.rollout.test_player import LIMITS, ScriptedEngines, begin, start
from tests.waiting import until

__all__ = ["tokenizer"]

AGENTS = """
import asyncio, os, random, sys, threading, time
from openai import AsyncOpenAI, BadRequestError, OpenAI

CLIENT = OpenAI(base_url="http://unused", api_key="unused")
ASYNC = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)


def run(task, base_url, api_key):
    return globals()[task.row["agent"]](task, base_url, api_key)


def say(client, messages, **more):
    message = client.chat.completions.create(model="m", messages=messages, **more).choices[0].message
    return [*messages, message]


def user(text):
    return {"role": "user", "content": text}


def three_turns(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [user(task.prompt)]
    for turn in range(3):
        messages = [*say(client, messages), user(f"turn {turn}")]
    return {"x": task.row["x"], "turns": 3}


async def of_a_coroutine(task, base_url, api_key):
    client = ASYNC.with_options(base_url=base_url, api_key=api_key)
    messages = [user(task.prompt)]
    for turn in range(3):
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages = [*messages, answer.choices[0].message, user(f"turn {turn}")]
    return {"x": task.row["x"], "turns": 3}


def instructed(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    say(client, [{"role": "developer", "content": "be brief"}, user(task.prompt)])
    return 1


def rewriting(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    for turn in range(3):
        say(client, [user("sum up"), {"role": "assistant", "content": f"turn {turn}"}, user("more")])
    return 1


def endless(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [user("go")]
    while True:
        messages = [*say(client, messages), user("on")]


def careful(task, base_url, api_key):
    try:
        endless(task, base_url, api_key)
    except BadRequestError:
        return 0.25


def raises(task, base_url, api_key):
    raise KeyError("mine")


def silent(task, base_url, api_key):
    return 1


def wrong(task, base_url, api_key):
    say(CLIENT.with_options(base_url=base_url, api_key=api_key), [user("go")])
    return "good"


def in_a_broken_endpoint(task, base_url, api_key):
    from rlctl.environments.agents import agent_session

    own, agent_session.read_turn = agent_session.read_turn, None
    try:
        careful(task, base_url, api_key)
    finally:
        agent_session.read_turn = own
    return 1


def many_reasons(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    for turn in range(12):
        say(client, [user("sum up"), *[{"role": "assistant", "content": "so"}, user("more")] * turn])
    return 1


def side_by_side(task, base_url, api_key):
    from concurrent.futures import ThreadPoolExecutor

    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    def ask(number):
        try:
            return len(say(client, [user(str(number))]))
        except BadRequestError:
            return 0

    with ThreadPoolExecutor(40) as threads:
        return sum(threads.map(ask, range(200)))


def stops(task, base_url, api_key):
    say(CLIENT.with_options(base_url=base_url, api_key=api_key), [user("go")], stop=["7"])
    return 1


def draws(task, base_url, api_key):
    say(CLIENT.with_options(base_url=base_url, api_key=api_key), [user(str(random.random()))])
    return 1
"""
COMMAND = """
import json, os, sys
from urllib.request import Request, urlopen

task = json.loads(os.environ["RLCTL_TASK"])
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
print("thinking")
exec(task["row"]["agent"])
"""


# A sandbox of the user's: the command sees these variables and no others.
WRAP = """
import os, sys

names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RLCTL_TASK")
os.execve(sys.argv[1], sys.argv[1:], {name: os.environ[name] for name in names})
"""
COUNT = """
import time
from pathlib import Path

folder = Path(task["row"]["x"])
(folder / str(os.getpid())).touch()
time.sleep(0.2)
print(len(list(folder.iterdir())))
(folder / str(os.getpid())).unlink()
"""


# Leaves out system messages, and takes an argument.
TEMPLATE = TOOLED.replace("in messages", "in messages if m.role != 'system'") + "{{ style | default('') }}"


@pytest.fixture(scope="module")
def pools(tmp_path_factory: Any, tokenizer: Any) -> Iterator[dict[bool, EnvironmentPool]]:
    """Return the pool of the command (True) and that of the functions, each with one process."""
    folder: Path = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENTS)
    (folder / "command.py").write_text(COMMAND)
    tokenizer.save_pretrained(folder / "tokenizer")
    with ExitStack() as stack:
        pool_by_kind = {}
        (folder / "wrap.py").write_text(WRAP)
        python = shlex.quote(sys.executable)
        wrapped = tuple(command_of(f"{python} {folder}/command.py", f"{python} {folder}/wrap.py"))
        for name, words in ((f"{folder / 'agents.py'}:run", ()), ("command", wrapped)):
            spec = EnvironmentSpec(name, 20.0, agent=AgentSpec(words))
            pool = stack.enter_context(EnvironmentPool({"agent": spec}, 2048, 1, emit=_note_message))
            pool.give_chat(ChatSpec(str(folder / "tokenizer"), TEMPLATE, None, None, "text"), "hermes")
            pool_by_kind[bool(words)] = pool
        yield pool_by_kind


MESSAGES = list[str]()


def _note_message(kind: str, **fields: Any) -> None:
    MESSAGES.append(fields["what"])


Play = Callable[..., tuple[list[Rollout], ScriptedEngines]]


@pytest.fixture
def play(pools: dict[bool, EnvironmentPool], tokenizer: Any) -> Play:
    """Return a function that plays rollouts of an agent of `AGENTS` in its process, with scripted engines."""

    def play_agent(
        agent: str,
        says: Any = lambda request: f"7{END}",
        count: int = 1,
        must_value: bool = True,
        command: bool = False,
        max_agents: int | None = None,
        x: Any = 1,
        arguments: Any = None,
        **limits: Any,
    ) -> tuple[list[Rollout], ScriptedEngines]:
        pool = pools[command]
        chat = Chat(tokenizer, TEMPLATE, None)
        engines = ScriptedEngines(chat, says, events=pool.events)
        agent_limits: EpisodeLimits = replace(LIMITS, **limits)
        runner = RolloutRunner(AgentPlayer(pool, chat, agent_limits, must_value, 1000, max_agents), engines)
        task = Task("r0", [], "play", None, {"x": x, "agent": agent, "chat_template_kwargs": arguments})
        ended = begin(runner, *(replace(start(index), task=task) for index in range(count)))

        def has_ended() -> bool:
            runner.check()
            return len(ended) == count

        until(has_ended)
        return ended, engines

    return play_agent


def episode_of(rollout: Rollout) -> PlayedEpisode:
    assert rollout.episode
    return rollout.episode


@pytest.mark.parametrize("agent", ["three_turns", "of_a_coroutine"])
def test_an_append_only_agent_trains_one_row_of_what_was_sampled(play: Play, agent: str) -> None:
    rollouts, engines = play(agent, lambda request: f"<think>{request.id.turn}</think>seven {request.id}{END}", count=8)
    for rollout in rollouts:
        (row,) = rollout.rows
        episode = episode_of(rollout)
        assert (episode.reward, episode.turns, episode.ending) == ({"x": 1, "turns": 3}, 3, "done")
        assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 3 and episode.opening == 1
        answered = [(request, tokens) for request, tokens in engines.answered if request.id.rollout == rollout.id]
        assert [request.id.turn for request, _ in answered] == [0, 1, 2]
        last_request, last_tokens = answered[-1]
        assert row.tokens.tolist() == [*last_request.prompt_tokens, *last_tokens]
        sampled: list[int] = []
        for _, tokens in answered:
            sampled += tokens
        assert row.tokens[row.sampled].tolist() == sampled


def test_instructions_that_the_template_leaves_out_are_counted_and_a_rows_arguments_are_taken(play: Play) -> None:
    (rollout,), engines = play("instructed", arguments={"style": "of the row"})
    assert episode_of(rollout).unwritten == 1 and episode_of(rollout).counts == {}
    ((request, _),) = engines.answered
    assert engines.chat.decode(request.prompt_tokens).endswith("assistant\nof the row")
    assert any("environment agent's messages: the chat template leaves some out" in line for line in MESSAGES)


def test_the_longest_wait_for_a_turn_is_known_whichever_turn_it_was(play: Play) -> None:
    def answer_second_turn_late(request: TurnRequest) -> str:
        if request.id.turn == 1:
            time.sleep(0.1)
        return f"7{END}"

    (slow,), _ = play("three_turns", answer_second_turn_late)
    metrics = environment_metrics([RolloutGroup(Task("r0", [], "", None), [slow])])
    assert metrics["agent/longest_turn"] == episode_of(slow).longest_turn_s >= 0.1


def test_a_rewritten_history_trains_each_token_once_and_is_told(play: Play) -> None:
    rollouts, engines = play("rewriting", count=8)
    assert [len(rollout.rows) for rollout in rollouts] == [3] * 8
    trained = []
    for rollout in rollouts:
        assert all(row.sampled.sum() == 2 for row in rollout.rows)
        trained += [row.tokens.tolist() for row in rollout.rows]
    assert sorted(trained) == sorted([*request.prompt_tokens, *tokens] for request, tokens in engines.answered)
    warnings = [message for message in MESSAGES if "agent/rows_per_episode" in message]
    assert len(warnings) == 1 and "3.0 rows" in warnings[0]
    assert "message 1 (assistant) has other content" in warnings[0]


def test_an_agent_that_meets_its_budget_is_cut_and_no_failure(play: Play) -> None:
    (rollout,), _ = play("careful", max_turns=4)
    episode = episode_of(rollout)
    assert (episode.reward, episode.turns, episode.ending, rollout.is_cut) == (0.25, 4, "max_turns", True)
    (rollout,), _ = play("endless", max_turns=4, must_value=False)
    episode = episode_of(rollout)
    assert (episode.reward, episode.turns, episode.ending, episode.failure) == (None, 4, "max_turns", None)
    (rollout,), _ = play("endless", max_turns=4)
    assert "a budget was used up (max_turns)" in str(episode_of(rollout).failure) and not rollout.rows


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raises", "run raised KeyError"),
        ("silent", "ended without a turn"),
        ("wrong", "must return a finite number"),
        # The agent caught the error, and returned a value.
        ("in_a_broken_endpoint", "the agents' endpoint failed with TypeError"),
    ],
)
def test_a_failure_is_no_value(play: Play, agent: str, cause: str) -> None:
    (rollout,), _ = play(agent)
    assert rollout.rows == [] and rollout.reward is None
    assert cause in str(episode_of(rollout).failure)


def test_reasons_are_cut_and_the_others_are_counted(play: Play) -> None:
    (rollout,), _ = play("many_reasons", max_turns=20)
    episode = episode_of(rollout)
    assert episode.counts and episode.rewritten and len(rollout.rows) == 12
    assert (episode.counts["rewritten"], len(episode.rewritten)) == (11, 8)
    assert agent_notes(episode.counts, episode.rewritten)[-1] == "requests: 3 began another row for further reasons"


def test_no_agent_gets_more_turns_than_its_budget(play: Play) -> None:
    """Two hundred requests side by side: each turn and each prompt is one node, and the rest is refused."""
    (rollout,), engines = play("side_by_side", max_turns=16)
    episode = episode_of(rollout)
    assert (episode.reward, episode.turns, episode.ending, len(engines.answered)) == (32, 16, "max_turns", 16)
    assert episode.counts and episode.counts["refused"] == 184 and len(rollout.rows) == 16


def test_a_stop_of_one_token_ends_the_turn_in_the_engine(play: Play, tokenizer: Any) -> None:
    _, engines = play("stops")
    assert [request.stops for request, _ in engines.answered] == [tuple(tokenizer("7").input_ids)]


def test_no_more_commands_run_at_one_time_than_allowed(play: Play, tmp_path: Path) -> None:
    rollouts, _ = play(COUNT, count=4, command=True, max_agents=2, x=str(tmp_path))
    assert {episode_of(rollout).reward for rollout in rollouts} <= {1.0, 2.0} and len(rollouts) == 4
    section = AgentSection(None, {}, "python x.py", None, 3, "127.0.0.1")
    assert most_agents(section) == 3 and most_agents(replace(section, max_processes="auto")) == 8 * usable_cores()
    assert most_agents(replace(section, name="x.py:run", command=None)) is None


def test_random_draws_are_the_groups(play: Play) -> None:
    rollouts, engines = play("draws", count=3)
    assert len({tuple(request.prompt_tokens) for request, _ in engines.answered}) == 1
    assert all(np.isfinite(rollout.log_probs).all() for rollout in rollouts)


@pytest.mark.parametrize(
    ("end", "reward", "cause"),
    [
        ("print(json.dumps({'reward': 0.5}))", 0.5, None),
        ("print('3'); print()", 3.0, None),
        ("sys.exit(3)", None, "exited with 3"),
        ("sys.exit(-1)", None, "exited with 255"),
        ("os.kill(os.getpid(), 9)", None, "ended by signal 9"),
        ("print('no number')", None, "gave no value"),
        # A child that stays behind holds the output open.
        ("import subprocess; subprocess.Popen(['sleep', '60']); print(1)", 1.0, None),
    ],
)
def test_a_command_gives_its_value_in_its_last_line(
    play: Play, end: str, reward: float | None, cause: str | None
) -> None:
    (rollout,), _ = play(end, command=True)
    episode = episode_of(rollout)
    assert episode.reward == reward and (cause or "None") in str(episode.failure)
