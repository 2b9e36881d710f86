import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_make", RECIPES / "tiny" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (RECIPES / "tiny-data" / f"{name}.jsonl").read_text().splitlines()]


def test_the_committed_data_is_what_the_script_writes(make, tmp_path):
    make.write_data(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (RECIPES / "tiny-data" / path.name).read_bytes()


def test_answers_are_right_and_no_validation_prompt_is_ever_trained_on():
    train, validation, taught = read("train"), read("validation"), read("sft")
    assert (len(train), len(validation)) == (2300, 200)
    for row in [*train, *validation]:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)
    held_out = {row["prompt"] for row in validation}
    assert not held_out & {row["prompt"] for row in [*train, *taught]}


def test_the_teacher_is_right_less_than_half_the_time():
    truth = {row["prompt"]: row["answer"] for row in read("train")}
    right = [truth[row["prompt"]] == row["answer"] for row in read("sft")]
    assert 0.4 < sum(right) / len(right) < 0.5


def test_the_committed_shape_is_what_the_script_writes(make, tmp_path):
    make.write_shape(tmp_path)
    for path in tmp_path.iterdir():
        written, committed = (
            json.loads(file.read_text()) for file in (path, RECIPES / "tiny" / "qwen3-tiny" / path.name)
        )
        for version in (written, committed):
            version.pop("transformers_version", None)
        assert written == committed


def test_the_committed_model_loads_as_any_other_and_is_small():
    from transformers import AutoModelForCausalLM

    folder = RECIPES / "tiny" / "qwen3-tiny"
    assert (folder / "model.safetensors").stat().st_size < 2**20
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 447_552


def test_the_tokenizer_has_one_token_a_character_and_gives_the_text_back(make, tmp_path):
    from transformers import AutoTokenizer

    make.write_shape(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12 + 7=19").input_ids
    assert len(ids) == 9
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12 + 7=19"
