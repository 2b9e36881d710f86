"""Scripted episodes: each tool is called with arguments of its schema, games get messages, failures are problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.plugins import ENVIRONMENTS
from rlctl.environments.check import check_environment, scripted_calls, signature
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.environments.tool_schema import tool_schema
from tests.unit.environments.test_tool_schema import Tools

OWN = """
import itertools
counter = itertools.count()

class Fine:
    def reset(self, **row):
        return "same"
    def get_reward(self):
        return {"a": 1, "b": 0.5}
    def say(self, text: str) -> str:
        \"\"\"Say.

        Args:
            text: It.
        \"\"\"
        raise RuntimeError(f"not {text}")

class Anew(Fine):
    def reset(self, **row):
        return f"task {next(counter)}"

class Silent(Fine):
    def reset(self, **row):
        return None

class Bad(Fine):
    def get_reward(self):
        return "much"
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def checked(name: str, *rows: dict[str, Any]) -> Any:
    return check_environment(EnvironmentSpec(name, 20.0), rows or [{}], memory_mib=2048, seed=0)


def test_arguments_fit_the_schema_and_a_column_of_the_same_name_comes_first() -> None:
    tools = [tool_schema(Tools.wide), tool_schema(Tools.plain)]
    wide, plain = scripted_calls(tools, {"name": "Ada"}, index=1)
    assert plain.arguments == {"x": 2, "name": "Ada", "deep": False}
    assert wide.arguments["a"] == [2] and wide.arguments["e"] == "down" and wide.arguments["q"] == "coffee"
    assert wide.arguments["g"] == [2, "1"] and wide.arguments["k"] == 2 and wide.arguments["n"] == {}
    json.dumps(wide.arguments)
    assert signature(tools[1]) == "plain(x: integer, name: string = ..., deep: boolean = ...) -> string"
    assert "e: 'up' | 'down'" in signature(tools[0]) and "h: array of array of object" in signature(tools[0])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_those_that_ship_pass(name: str) -> None:
    from itertools import islice

    from rlctl.utils.plugins import load_object

    rows = list(islice(load_object(f"{ENVIRONMENTS[name].partition(':')[0]}:tasks")(0), 3))
    report = check_environment(EnvironmentSpec(name, 20.0), rows, memory_mib=2048, seed=0)
    assert (report.problems, report.notes) == ([], [])
    assert all(each.turns and each.reward is not None for each in report.episodes)


def test_what_a_tool_raises_is_an_answer_and_no_problem() -> None:
    report = checked("own.py:Fine", {"prompt": "Say it. ", "text": "this"})
    assert report.problems == [] and len(report.episodes) == 3
    (turn,) = report.episodes[0].turns
    assert (turn.said, turn.answer, turn.failed) == ("say(text='this')", "Error: not this", True)
    assert report.episodes[0].opening == [{"role": "user", "content": "Say it. same"}]
    assert report.episodes[0].reward == {"a": 1.0, "b": 0.5}


def test_a_class_that_draws_its_task_from_elsewhere_is_noted() -> None:
    report = checked("own.py:Anew")
    assert report.problems == [] and "two resets of one row with one seed began differently" in report.notes[0]


def test_every_failure_is_a_problem() -> None:
    report = checked("own.py:Bad")
    assert len(report.problems) == 3
    assert report.problems[0].startswith("episode 1: reward broke the contract: get_reward must return a finite number")
    assert "it begins with no message" in checked("own.py:Silent").problems[0]
    picture = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    assert "content must be text" in checked("own.py:Fine", picture).problems[0]
    assert checked("own.py:Nothing").problems == ["own.py has no Nothing"]
