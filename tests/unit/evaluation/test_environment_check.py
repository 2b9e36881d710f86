"""Scripted episodes: each tool is called with arguments of its schema, games get messages, failures are problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.plugins import ENVIRONMENTS
from rlctl.data.files import DataError
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.environments.tool_schema import tool_schema
from rlctl.evaluation.environment_check import check_environment, rows_to_try, scripted_calls, signature
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

class Typo(Fine):
    def reset(self, **row):
        self.count = 0
        return "same"
    def say(self, text: str):
        \"\"\"Say.

        Args:
            text: It.
        \"\"\"
        self.cout += 1
    def hush(self):
        \"\"\"Say nothing.\"\"\"

class Unfit(Fine):
    def look(self, where, far, *places):
        \"\"\"Look.\"\"\"
    def see(self, a: int, b: int):
        \"\"\"See.\"\"\"

class Bad(Fine):
    def get_reward(self):
        return "much"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def check(name: str, *rows: dict[str, Any]) -> Any:
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

    from rlctl.utils.user_code import load_object

    rows = list(islice(load_object(f"{ENVIRONMENTS[name].partition(':')[0]}:tasks")(0), 3))
    report = check_environment(EnvironmentSpec(name, 20.0), rows, memory_mib=2048, seed=0)
    # The script wins no episode.
    assert report.problems == [] and all(note.startswith("every episode has the same") for note in report.notes)
    assert all(episode.turns and episode.reward is not None for episode in report.episodes)


def test_what_a_tool_raises_is_an_answer_and_no_problem() -> None:
    report = check("own.py:Fine", {"prompt": "Say it. ", "text": "this"})
    assert report.problems == [] and len(report.episodes) == 3
    (turn,) = report.episodes[0].turns
    assert (turn.said, turn.answer, turn.failed) == ("say(text='this')", "Error: not this", True)
    assert report.episodes[0].opening == [{"role": "user", "content": "Say it. same"}]
    assert report.episodes[0].reward == {"a": 1.0, "b": 0.5}


def test_without_rows_a_class_that_begins_with_no_message_is_played_after_a_made_up_one() -> None:
    report = check("own.py:Silent")
    assert report.problems == []
    assert all(episode.turns and episode.reward is not None for episode in report.episodes)
    assert "each row of a run needs a column prompt" in report.notes[0] and "--data FILE" in report.notes[0]
    assert not any("began differently" in note for note in report.notes)


def test_a_reward_that_takes_no_environments_is_named() -> None:
    with Path("own.py").open("a") as file:
        file.write("\ndef valued(environment, **columns):\n    return [1.0]\n")
    spec = EnvironmentSpec("own.py:Fine", 20.0, rewards=("own.py:valued",))
    report = check_environment(spec, [{"prompt": "Say it."}], memory_mib=2048, seed=0)
    assert "own.py:valued takes no parameter `environments`: it is not tried here" in report.notes


def test_a_class_that_draws_its_task_from_elsewhere_is_noted() -> None:
    report = check("own.py:Anew")
    assert report.problems == [] and "two resets of one row with one seed began differently" in report.notes[0]


def test_a_bug_in_a_tool_is_a_problem_with_its_line_and_silence_and_equal_rewards_are_noted() -> None:
    report = check("own.py:Typo")
    (line,) = report.problems
    assert line.startswith("tool say raised AttributeError at own.py:36: 'Typo' object has no attribute 'cout'")
    assert line.endswith("it looks like a bug, since say(text='text') fits the tool's schema")
    silent, equal = report.notes
    assert silent == "tool hush answered None, and the model reads that word: return its answer"
    assert equal.startswith("every episode has the same reward, a 1, b 0.5: equal rewards teach nothing")


def test_all_that_breaks_the_contract_is_told_at_once() -> None:
    assert check("own.py:Unfit").problems == [
        "tool look: parameter where has no type hint",
        "tool look: parameter far has no type hint",
        "tool look: parameter *places: a call gives arguments by their names; write list[...]",
        "tool see: parameter a has no description: add a line `a: ...` below `Args:`",
        "tool see: parameter b has no description: add a line `b: ...` below `Args:`",
    ]


PLAY = """
async def play(task, policy):
    first = await policy.sample(task.tokens)
    while first.tokens:
        second, first = first, await policy.sample(task.tokens + first.tokens)
    return float(bytes(second.tokens) == task.answer.encode())

async def typo(task, policy):
    await policy.sample(task.tokens)
    return polcy.reward

async def deaf(task, policy):
    while True:
        await policy.sample(task.tokens)

async def silent(task, policy):
    return 1.0

def plain(task, policy):
    return 1.0
"""


def test_a_rollout_function_is_called_with_scripted_answers() -> None:
    Path("mine.py").write_text(PLAY)

    def check_function(name: str) -> Any:
        spec = EnvironmentSpec(f"mine.py:{name}", 20.0, is_function=None)
        return check_environment(spec, [{"prompt": "2+2=", "answer": "4"}], memory_mib=2048, seed=0)

    report = check_function("play")
    assert report.problems == [] and [len(episode.samples) for episode in report.episodes] == [9, 9, 9]
    assert report.episodes[0].samples[0] == (4, 1) and report.episodes[0].samples[-1][1] == 0
    assert report.notes[0].startswith("every episode has the same reward, 0: ")
    problem = "episodes 1, 2, 3: typo raised NameError at mine.py:10: name 'polcy' is not defined"
    assert check_function("typo").problems[0] == problem
    assert "sampled again after a budget was used up" in check_function("deaf").problems[0]
    assert "returned without a sample" in check_function("silent").problems[0]
    assert "must be `async def plain(task, policy)`" in check_function("plain").problems[0]


def test_every_failure_is_a_problem() -> None:
    report = check("own.py:Bad")
    assert len(report.problems) == 1
    assert report.problems[0].startswith(
        "episodes 1, 2, 3: reward broke the contract: get_reward must return a finite number"
    )
    assert "there is nothing to answer" in check("own.py:Silent", {"a": 1}).problems[0]
    picture = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    assert "content must be text" in check("own.py:Fine", picture).problems[0]
    assert check("own.py:Nothing").problems == ["own.py has no Nothing"]


def test_a_mistyped_file_of_tasks_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"answer": "1"}\n')
    with pytest.raises(DataError, match=r"^no file or folder task\.jsonl; did you mean tasks\.jsonl\?$"):
        rows_to_try("guess", "task.jsonl", 0, 1)
    with pytest.raises(DataError, match=r"^no file or folder task; "):
        rows_to_try("guess", "task", 0, 1)
    assert len(rows_to_try("guess", "tasks.jsonl", 0, 1)[1]) == 1
