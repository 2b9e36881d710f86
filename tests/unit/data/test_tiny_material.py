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


def test_a_new_model_is_the_same_for_a_seed_and_loads_as_any_other(make, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        make.write_init(tmp_path / folder, seed)
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc"]
    assert weights[0] == weights[1] != weights[2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) * 2 <= 1_000_000  # bytes in bfloat16


def test_the_tokenizer_has_one_token_a_character_and_gives_the_text_back(make, tmp_path):
    from transformers import AutoTokenizer

    make.write_init(tmp_path, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12 + 7=19").input_ids
    assert len(ids) == 9
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12 + 7=19"
