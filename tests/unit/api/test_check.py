"""`rlctl.check`, and overrides of every function: as text, as Python values, and as objects instead of names."""

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import rlctl
from rlctl.api.objects import texts_of
from rlctl.utils.user_code import load_object


def brevity(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
    """Reward that is defined at the top level of a module."""
    return -float(len(completion))


def test_all_problems_come_at_once_and_are_those_of_the_command(home: Path) -> None:
    with pytest.raises(rlctl.ConfigError) as error:
        rlctl.check("grpo-tiny", ["grpo.num_step=10", "trainer.optimizer.lr=fast"])
    assert str(error.value).splitlines() == [
        "override 1: grpo.num_step=10: unknown key; did you mean num_steps?",
        "override 2: trainer.optimizer.lr=fast: must be a number, not 'fast'",
    ]
    assert [problem.key for problem in error.value.problems] == ["grpo.num_step", "trainer.optimizer.lr"]


def test_a_checked_config_has_every_key() -> None:
    checked = rlctl.check("grpo-tiny", {"grpo.num_steps": 7, "data.train.limit": 8})
    assert checked.kind == "grpo"
    assert checked.config["grpo"]["num_steps"] == 7
    assert checked.config["async"]["enabled"] is False


def test_values_are_what_they_are_and_need_no_quotes(tmp_path: Path) -> None:
    values = {
        "run.name": "007",
        "data.train.path": tmp_path / "a b.jsonl",
        "rewards": ["exact", {"name": "regex", "weight": 0.5}],
        "lora": None,
        "async.enabled": True,
    }
    assert texts_of(values, lambda: tmp_path) == [
        'run.name="007"',
        f'data.train.path="{tmp_path}/a b.jsonl"',
        'rewards=["exact", {"name": "regex", "weight": 0.5}]',
        "lora=null",
        "async.enabled=true",
    ]


def test_a_function_of_a_module_is_named_by_its_file(tmp_path: Path) -> None:
    (text,) = texts_of({"rewards": [brevity]}, lambda: tmp_path / "objects")
    assert text == f'rewards=["{Path(__file__).resolve()}:brevity"]'
    assert not (tmp_path / "objects").exists()


def test_a_closure_and_an_instance_are_kept_in_files_that_only_their_user_reads(tmp_path: Path) -> None:
    weight = 0.25

    def weighted(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
        return weight * len(completion)

    folder = tmp_path / "objects"
    rewards = [weighted, functools.partial(brevity, "prompt"), lambda prompt, completion, answer, row: weight]
    (text,) = texts_of({"rewards": rewards}, lambda: folder)
    closure_name, partial_name, lambda_name = text.removeprefix('rewards=["').removesuffix('"]').split('", "')
    assert load_object(lambda_name)("", "", "", {}) == weight
    assert load_object(closure_name)("", "four", "", {}) == 1.0
    assert load_object(partial_name)("four", "", {}) == -4.0
    assert folder.stat().st_mode & 0o777 == 0o700


def test_rows_stand_where_a_recipe_names_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+é=", "answer": "3"}]
    folder = tmp_path / "objects"
    overrides = {"data.train.path": rows, "data": {"validation": {"path": Dataset.from_list(rows)}}}
    texts = texts_of(overrides, lambda: folder)
    (file,) = folder.iterdir()
    assert texts == [f'data.train.path="{file}"', f'data={{"validation": {{"path": "{file}"}}}}']
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert folder.stat().st_mode & 0o777 == 0o700
    assert rlctl.check("grpo-tiny", {"data.train.path": rows}).config["data"]["train"]["path"].endswith(file.name)


def test_rows_in_the_place_of_a_section_and_rows_that_json_has_not_are_refused(tmp_path: Path) -> None:
    overrides = {
        "data.train": [{"prompt": "1+1="}],
        "data.validation.path": [{"prompt": "1"}, {"prompt": {1, 2}}],
        "data": {"train": {"path": {"prompt"}}},
    }
    with pytest.raises(rlctl.ConfigError) as error:
        texts_of(overrides, lambda: tmp_path)
    assert str(error.value).splitlines() == [
        "overrides: data.train: is a section: rows go to data.train.path",
        "overrides: data.validation.path: row 2 cannot be written as JSON: Object of type set is not JSON serializable",
        "overrides: data: is a set: give a path, a list of mappings (to_dict('records') of a DataFrame), or a Dataset",
    ]
    with pytest.raises(rlctl.ConfigError, match=r"override 1: data.train.path=\[\]: not set: a file"):
        rlctl.check("grpo-tiny", {"data.train.path": []})


def right(completions: Any, solution: Any, **columns: Any) -> list[float]:
    """A reward of TRL's form, for chats."""
    pairs = zip(completions, solution, strict=True)
    return [float(completion[0]["content"].strip() == answer) for completion, answer in pairs]


def test_a_data_set_and_a_reward_of_trl_need_no_file() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{a}+1="}], "solution": str(a + 1)} for a in range(40)]
    values = {
        "model.path": "tiny/qwen3-tiny",
        "data.train": {"path": Dataset.from_list(rows), "answer_key": "solution"},
        "data.validation.fraction": 0.05,
        "rewards": [right],
        "generation.max_new_tokens": 4,
    }
    checked = rlctl.check("grpo", values, try_rewards=True)
    assert checked.notes[-1].endswith(".jsonl: right 1; its own answer is right")


def test_what_no_process_can_be_sent_is_refused_in_a_line(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
        with lock:
            return 1.0

    with pytest.raises(rlctl.ConfigError) as error:
        texts_of({"rewards": [locked], "run.seed": {1, 2}}, lambda: tmp_path)
    assert str(error.value).splitlines() == [
        "overrides: rewards: locked cannot be sent to the processes of a run: cannot pickle '_thread.lock' object; "
        "make what it holds inside the function, or put it into a file of its own",
        "overrides: run.seed: is a set: give text, numbers, lists, mappings, a function or a class",
    ]


def test_one_text_for_all_overrides_is_refused() -> None:
    with pytest.raises(rlctl.ConfigError, match=r'is one text: give a list, \["run.seed=1"\]'):
        rlctl.check("grpo-tiny", "run.seed=1")


def test_a_reward_object_is_tried_and_its_error_names_its_line(home: Path) -> None:
    def failing(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
        raise ValueError("not today")

    line = failing.__code__.co_firstlineno + 1
    with pytest.raises(rlctl.ConfigError, match=rf"test_check\.py:{line}: not today"):
        rlctl.check("grpo-tiny", {"rewards": [failing]}, try_rewards=True)
    notes = rlctl.check("grpo-tiny", {"rewards": [brevity]}, try_rewards=True).notes
    assert any("brevity -" in note for note in notes), notes


def test_a_recipe_or_a_resume_is_named_and_not_both() -> None:
    with pytest.raises(rlctl.ConfigError, match="name a recipe, or a run to resume"):
        rlctl.train()
    with pytest.raises(rlctl.ConfigError, match="name a recipe, or a run to resume"):
        rlctl.train("grpo-tiny", resume="a-run")


def test_an_import_is_lazy_and_changes_nothing_of_the_process() -> None:
    code = """
import os, sys
variables = dict(os.environ)
import rlctl
light = set(sys.modules)
rlctl.check("grpo-tiny")
assert dict(os.environ) == variables, set(os.environ) ^ set(variables)
print(*(name for name in ("numpy", "yaml") if name in light))
print(*(name for name in ("torch", "ray", "vllm", "typer") if name in sys.modules))
"""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert process.stdout == "\n\n", process.stdout


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    with pytest.raises(AttributeError, match="module 'rlctl' has no attribute 'trian'; did you mean train"):
        rlctl.trian  # noqa: B018
    assert {"train", "check", "evaluate", "load_run"} <= set(dir(rlctl))
    assert rlctl.__version__
