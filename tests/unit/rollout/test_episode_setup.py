"""Environments of a config, read in a separate process and begun once: every problem is found before a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import Chat
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import UnusableEnvironmentError
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import settle
from rlctl.rollout.episode_setup import EpisodeSetup, environment_pool, episode_limits, read_environments, set_up
from rlctl.telemetry.metrics import Metric, ReportChart
from tests.unit.data.conftest import CHATML, tokenizer
from tests.unit.data.test_turn_link import STRIPS, TOOLS

__all__ = ["tokenizer"]

ADDER = """
class Adder:
    def reset(self, start=None, **row):
        return None if start is None else f"begin at {start}"

    def add(self, n: int) -> int:
        '''Add.

        Args:
            n: The number.
        '''
        return n
"""
TASK = Task("r0", [], "", None, {"start": 3})


def load_config(*overrides: str) -> GrpoConfig:
    config = load("grpo", None, ["rewards=[]", *overrides]).config
    assert isinstance(config, GrpoConfig)
    return config


def find_problems(config: GrpoConfig, chat: Chat, task: Task = TASK) -> list[tuple[str, str]]:
    with environment_pool(config) as pool, pytest.raises(UnusableEnvironmentError) as caught:
        set_up(config, pool, chat, task)
    return caught.value.problems


def test_an_environment_is_read_and_begun_on_the_first_task(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    config = load_config(f"environment={{name: {tmp_path}/adder.py:Adder, tool_format: hermes}}", "rewards=[exact]")
    with environment_pool(config) as pool:
        setup = set_up(config, pool, Chat(tokenizer, TOOLS, None), TASK)
    assert setup.first == [{"role": "user", "content": "begin at 3"}] and setup.tool_format == "hermes"
    assert [tool["function"]["name"] for tool in setup.tools] == ["add"] and list(setup.contracts) == ["Adder"]


def test_the_metrics_that_a_class_declares_come_out_of_its_process(tokenizer: Any, tmp_path: Path) -> None:
    """A class with another kind of `metrics` declares none."""
    row = 'Metric("reward/speed/mean", "steps saved, mean", chart=ReportChart("Episodes and tools", "Speed"))'
    texts = {
        "fast": f"from rlctl.telemetry.metrics import Metric, ReportChart\n{ADDER}\n    metrics = ({row},)\n",
        "plain": f"{ADDER}\n    metrics = {{'speed': 1}}\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    choices = ", ".join(f"{name}: {tmp_path}/{name}.py:Adder" for name in texts)
    config = load_config(f"environment.choices={{{choices}}}")
    with environment_pool(config) as pool:
        contracts = read_environments(config, pool)
    assert contracts["plain"].metrics == []
    setup = EpisodeSetup(contracts, None, [], [], [], [])
    assert setup.metrics == [
        Metric("reward/speed/mean", "steps saved, mean", chart=ReportChart("Episodes and tools", "Speed"), panel=())
    ]


def test_every_problem_is_told_at_once_by_its_key(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    config = load_config(f"environment.name={tmp_path}/adder.py:Adder")
    assert find_problems(config, Chat(tokenizer, CHATML, None), Task("r0", [], "", None)) == [
        (
            "environment.name",
            "has no get_reward, and rewards is empty: nothing values its episodes; name a function of yours in "
            "rewards, as `def reward(environments, **kwargs)`",
        ),
        (
            "environment.tool_format",
            "the chat template has no format of tool calls that is known: set hermes, llama3, mistral, qwen3_coder",
        ),
        ("environment.name", "row r0 has no prompt, and reset returned None"),
    ]


def test_a_class_that_cannot_be_made_is_told_by_the_key_of_its_choice(tokenizer: Any) -> None:
    config = load_config("environment.choices={a: guess, b: {name: maze, args: {wrong: 1}}}")
    ((key, reason),) = find_problems(config, Chat(tokenizer, CHATML, None))
    assert key == "environment.choices.b.name" and "wrong" in reason


@pytest.mark.parametrize(("history", "message"), [("keep", "stay as they were sampled"), ("strip", "another row")])
def test_a_template_that_rewrites_history_is_named_with_what_is_done(
    tokenizer: Any, history: str, message: str
) -> None:
    config = load_config("environment.name=guess", f"environment.history={history}")
    with environment_pool(config) as pool:
        (note,) = set_up(config, pool, Chat(tokenizer, STRIPS, None), TASK).notes
    assert note.startswith(f"environment.history={history}: the chat template writes earlier turns") and message in note


def test_a_first_message_that_the_template_leaves_out_is_told(tokenizer: Any) -> None:
    config = load_config("environment.name=guess")
    template = CHATML.replace("in messages", "in messages if m.role != 'system'")
    task = replace(TASK, messages=[{"role": "system", "content": "Be brief."}])
    with environment_pool(config) as pool:
        (note,) = set_up(config, pool, Chat(tokenizer, template, None), task).notes
    assert note.startswith("data.chat_template: the template leaves out a message of role system: the model does not")


def test_budgets_are_those_of_the_config() -> None:
    config = load_config("environment.name=guess", "environment.max_turns=3", "model.max_length=60")
    limits = episode_limits(settle(config, RunMachine(), None), trains=False)
    assert (limits.max_turns, limits.max_length, limits.timeout_s, limits.max_retries) == (3, 60, 600.0, 2)
