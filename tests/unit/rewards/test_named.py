"""Rewards written for TRL or verl get the same arguments as in these tools, and an `async def` is awaited."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.data.tasks import Task
from rlctl.rewards.base import RewardError, RewardFailure, attempt, attempt_coroutine
from rlctl.rewards.load_rewards import load_reward
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.scoring import reward_input
from rlctl.rollout.types import PlayedEpisode

SOURCE = """\
import asyncio
from functools import partial

def roles(prompts, completions, **columns):
    assert [*columns] == ["question", "solution"]
    return [float([message["role"] for message in prompts[0] + completions[0]] == ["user", "assistant"])]

def length(completions, **columns):
    return [len(completions[0])]

def buggy(completions, **columns):
    return [1 / len(columns["missing"])]

def abstains(completions, **columns):
    return [None if completions[0] == "odd" else 0.5]

async def judged(prompt, completion, answer, row):
    await asyncio.sleep(0)
    return float(completion == answer)

lock = None

async def keeps_a_lock(completions, **columns):
    global lock
    lock = lock or asyncio.Lock()
    waiting = asyncio.create_task(lock.acquire())
    async with lock:
        await asyncio.sleep(0)
    await waiting
    lock.release()
    return [1.0]

partly = partial(judged)

class AsyncJudge:
    async def __call__(self, prompt, completion, answer, row):
        return 1.0

judge = AsyncJudge()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float((data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "4", "4", {"index": 3}))}

def by_keyword(*, data_source, solution_str, ground_truth, extra_info):
    return [extra_info]
"""
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Each test's module has a different name in `sys.modules`.
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return file.name


def make_section(source: str, name: str) -> RewardSection:
    return RewardSection(f"{source}:{name}", 1.0, None, None, 60.0, 64)


TASK = Task("r0", [], "USER: 2+2?", "4", {"question": CHAT, "solution": "4"}, messages=CHAT)


def score_text(source: str, name: str, task: Task = TASK, text: str = "4") -> object:
    """Return the value of a reward of the source, or its failure as a text."""
    outcome = attempt(load_reward(make_section(source, name)), reward_input(task, None, text))
    return str(outcome) if isinstance(outcome, RewardFailure) else outcome


def test_completions_are_messages_where_the_prompt_is_a_chat_and_else_text(source: str) -> None:
    assert score_text(source, "roles") == 1.0
    assert score_text(source, "length", text="four") == 1.0
    assert score_text(source, "length", replace(TASK, messages=[]), "four") == 4.0


def test_an_episode_gives_its_whole_conversation(source: str) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And?"}]
    task = Task("r0", [], "", None)
    episode = PlayedEpisode(
        messages=messages,
        opening=1,
        ending="done",
        turns=1,
        reward=None,
        failure=None,
        failures=0,
        environment_s=0.0,
        tool_calls=0,
        tool_errors=0,
    )
    episode_input = reward_input(task, episode, "never read")
    assert attempt(load_reward(make_section(source, "length")), episode_input) == 2.0


@pytest.mark.parametrize("name", ["judged", "keeps_a_lock", "partly"])
def test_a_coroutine_is_awaited_in_one_event_loop(source: str, name: str) -> None:
    reward = load_reward(make_section(source, name))
    item = reward_input(TASK, None, "4")
    if reward.form == "plain":  # a function that returns a coroutine
        assert [attempt(reward, item) for _ in range(2)] == [1.0, 1.0]
        return
    with asyncio.Runner() as runner:
        assert [runner.run(attempt_coroutine(reward, [item])) for _ in range(2)] == [[1.0], [1.0]]


def test_an_object_that_is_async_is_refused(source: str) -> None:
    with pytest.raises(RewardError) as error:
        load_reward(make_section(source, "judge"))
    line = SOURCE.splitlines().index("class AsyncJudge:") + 2
    assert str(error.value) == (
        f"is an object whose __call__ is async at {source}:{line}: write def __call__, or an async def function"
    )


def test_an_error_has_the_users_line_and_trace(source: str) -> None:
    task = Task("r0", [], "2+2?", "4")
    failure = attempt(load_reward(make_section(source, "buggy")), reward_input(task, None, "4"))
    assert isinstance(failure, RewardFailure)
    line = SOURCE.splitlines().index('    return [1 / len(columns["missing"])]') + 1
    assert failure.cause == f"raised KeyError at {source}:{line}"
    assert "rlctl" not in failure.trace


def test_a_reward_of_none_is_left_out_of_the_sum_and_leaves_the_decision_to_the_next(source: str) -> None:
    task = Task("r0", [], "2+2?", "odd")
    inputs = [reward_input(task, None, text) for text in ("odd", "even")]
    with Scorer([make_section(source, "abstains"), RewardSection("exact", 1.0, None, None, 60.0, 64)]) as scorer:
        odd, even = scorer.score(inputs)
    assert (odd.value, odd.parts, odd.right, odd.failed) == (1.0, {"abstains": None, "exact": 1.0}, True, None)
    assert (even.value, even.parts, even.right) == (0.5, {"abstains": 0.5, "exact": 0.0}, False)
    with Scorer([make_section(source, "abstains")]) as scorer:
        odd, even = scorer.score(inputs)
    assert (odd.value, odd.failed) == (None, "abstains: no reward judges it: each returned None")
    assert even.value == 0.5


def test_a_compute_score_of_verl_gets_its_arguments_by_name(source: str) -> None:
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 3}}
    assert score_text(source, "compute_score", replace(TASK, row=row)) == 1.0
    assert score_text(source, "compute_score", replace(TASK, row=row, answer=None)) == 1.0
    line = SOURCE.splitlines().index("def by_keyword(*, data_source, solution_str, ground_truth, extra_info):") + 1
    returned = f"no finite number at {source}:{line}: [{{'index': 3}}]"
    assert score_text(source, "by_keyword", replace(TASK, row=row)) == returned
    assert score_text(source, "by_keyword") == (
        f"no value for its parameter data_source at {source}:{line}: it gets extra_info, solution_str, ground_truth; "
        "data_source, extra_info are columns of verl's rows"
    )
