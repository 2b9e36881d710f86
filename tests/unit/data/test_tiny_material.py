"""Material of the tiny recipes: the committed files equal the scripts' output, and nothing held out is ever taught."""

import gzip
import importlib.util
import json
import re
import sys
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"
DATA = RECIPES / "tiny-data"
# The model of each script, and its parameters.
MODELS = {"make": ("qwen3-tiny", 447_552), "make_games": ("qwen3-games", 397_408), "make_code": ("qwen3-code", 391_264)}


def script(name: str) -> ModuleType:
    # A script may import another one, as it does where it is run.
    if str(RECIPES / "tiny") not in sys.path:
        sys.path.append(str(RECIPES / "tiny"))
    spec = importlib.util.spec_from_file_location(name, RECIPES / "tiny" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> ModuleType:
    return script(request.param)


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content(DATA / name).splitlines()]


def contents_of(role: str) -> list[list[str]]:
    """Return the texts of one role in each chat of the games' teacher."""
    chats = [row["messages"] for row in read("games-sft.jsonl.gz")]
    return [[message["content"] for message in chat if message["role"] == role] for chat in chats]


def test_the_committed_data_is_what_the_script_writes(make, tmp_path):
    make.write_data(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert len(written) == {"make": 3, "make_games": 5, "make_code": 5}[make.__name__]
    for name in written:
        assert content(tmp_path / name) == content(DATA / name)


def test_the_committed_shape_is_what_the_script_writes(make, tmp_path):
    make.write_shape(tmp_path)
    folder = RECIPES / "tiny" / MODELS[make.__name__][0]
    for path in tmp_path.iterdir():
        if path.suffix != ".json":
            assert path.read_text() == (folder / path.name).read_text()
            continue
        written = json.loads(path.read_text())
        committed = json.loads((folder / path.name).read_text())
        written.pop("transformers_version", None)
        committed.pop("transformers_version", None)
        assert written == committed


@pytest.mark.parametrize(("name", "parameters"), MODELS.values())
def test_a_committed_model_loads_as_any_other_and_is_small(name: str, parameters: int) -> None:
    from transformers import AutoModelForCausalLM

    folder = RECIPES / "tiny" / name
    assert (folder / "model.safetensors").stat().st_size < 2**20
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_sums_are_right_and_no_validation_prompt_is_ever_trained_on() -> None:
    train = read("train.jsonl")
    validation = read("validation.jsonl")
    assert (len(train), len(validation)) == (2300, 200)
    for row in [*train, *validation]:
        summands = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == sum(map(int, summands))
    held_out = {row["prompt"] for row in validation}
    assert not held_out & {row["prompt"] for row in [*train, *read("sft.jsonl")]}


def test_the_teacher_of_sums_is_right_less_than_half_the_time() -> None:
    truth = {row["prompt"]: row["answer"] for row in read("train.jsonl")}
    right = [truth[row["prompt"]] == row["answer"] for row in read("sft.jsonl")]
    assert 0.4 < sum(right) / len(right) < 0.5


def test_no_chat_and_no_task_to_train_on_has_a_range_or_a_problem_that_is_held_out() -> None:
    questions = " ".join(chain.from_iterable(contents_of("user")))
    ranges = {(int(low), int(high)) for low, high in re.findall(r"from (\d+) to (\d+)", questions)}
    problems = set(re.findall(r"Compute (.*?)\. Use", questions))
    assert len(ranges) > 300 and len(problems) > 5000
    task_of_guess = itemgetter("low", "high")
    task_of_calculator = itemgetter("expression")
    for game, task, taught in (("guess", task_of_guess, ranges), ("calculator", task_of_calculator, problems)):
        train = [task(row) for row in read(f"{game}-train.jsonl")]
        held_out = [task(row) for row in read(f"{game}-validation.jsonl")]
        assert (len(train), len(held_out)) == (1000, 200)
        assert not (set(train) | taught) & set(held_out)


def test_the_teacher_of_games_is_mostly_stubborn_and_gives_few_problems_to_the_tool() -> None:
    answers = contents_of("assistant")
    games = [numbers for numbers in answers if len(numbers) > 1 and numbers[0].isdigit()]
    problems = [calls for calls in answers if calls[-1] == "Done."]
    assert 0.6 < sum(len(set(numbers)) == 1 for numbers in games) / len(games) < 0.7
    assert 0.3 < sum("calculate" in calls[0] for calls in problems) / len(problems) < 0.4


def test_programs_pass_their_tests_and_forgetful_ones_pass_few() -> None:
    make_code = script("make_code")
    held_out = {row["messages"][0]["content"] for row in read("code-validation.jsonl")}
    taught = [row["messages"] for row in read("code-sft.jsonl.gz") if row["messages"][0]["role"] == "user"]
    trained = {row["messages"][0]["content"] for row in read("code-train.jsonl")}
    assert (len(held_out), len(trained)) == (200, 1500)
    assert not held_out & (trained | {messages[0]["content"] for messages in taught})
    programs: dict[str, set[str]] = {}
    for question, program in taught:
        programs.setdefault(question["content"], set()).add(program["content"])
    forgetful_passes = 0
    rows = [row for row in read("code-train.jsonl") if len(programs.get(row["messages"][0]["content"], ())) == 2]
    for row in rows[:300]:
        forgetful = programs[row["messages"][0]["content"]] - {row["answer"]}
        results = {}
        for program in (row["answer"], *forgetful):
            names: dict[str, Any] = {}
            exec(program, names)
            results[program] = [eval(test.removeprefix("assert "), names) for test in row["test_list"]]
        assert len(row["test_list"]) == make_code.TESTS and all(results[row["answer"]])
        forgetful_passes += sum(all(results[program]) for program in forgetful)
    assert forgetful_passes < 0.12 * 300


def test_the_strides_of_the_teacher_find_any_of_15_numbers() -> None:
    for first in (6, 7, 8):
        for secret in range(15):
            guess = first
            for stride in script("make_games").STRIDES:
                guess += stride if guess < secret else -stride if guess > secret else 0
            assert guess == secret


def test_the_tokenizer_of_sums_has_one_token_a_character_and_gives_the_text_back() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny" / "qwen3-tiny")
    ids = tokenizer("12 + 7=19").input_ids
    assert len(ids) == 9
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12 + 7=19"
