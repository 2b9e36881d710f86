"""The driver's reading of a model folder, and a random model in another's shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.errors import ModelError
from rlctl.config.schema import ModelSection
from rlctl.models.meta_model import write_random_model
from rlctl.models.model_files import ModelFiles, list_end_tokens
from tests.tiny_models import make_model
from tests.unit.folders import weights

FACTS = {"max_position_embeddings": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
FACTS |= {"intermediate_size": 64, "vocab_size": 32}


def folder_of(root: Path, config: dict[str, Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", **FACTS, **config}))
    (root / "model.safetensors").write_bytes(weights())
    return root


def find_files(folder: Path, run: Path, random_init: bool = False, seed: int = 0) -> ModelFiles:
    return ModelFiles.prepare(
        ModelSection(str(folder), tokenizer=None, random_init=random_init, max_length=None), run, seed
    )


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"eos_token_id": 7})
    files = find_files(folder, tmp_path / "run")
    assert (files.folder, files.source, files.max_length) == (str(folder), str(folder), 512)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["nobody/nothing", "no/body/nothing", "x" * 300])
def test_a_model_that_the_hub_does_not_give_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"^{name}: no folder, and not to be had from the hub: .+$"):
        find_files(Path(name), tmp_path / "run")


@pytest.mark.parametrize(("head_dim", "width"), [({}, 64), ({"head_dim": None}, 64), ({"head_dim": 32}, 128)])
def test_attention_is_as_wide_as_heads_times_their_size(
    tmp_path: Path, head_dim: dict[str, int | None], width: int
) -> None:
    assert find_files(folder_of(tmp_path / "m", head_dim), tmp_path).facts.attention == ((width, None),) * 3


def test_a_random_model_is_made_once_in_the_run_directory_and_the_seed_decides_its_bytes(tmp_path: Path) -> None:
    shape = make_model(tmp_path / "shape", "qwen2")
    files = find_files(shape, tmp_path / "run", True, seed=3)
    init_folder = Path(files.folder)
    assert init_folder == tmp_path / "run" / "init"
    assert (init_folder / "tokenizer.json").read_bytes() == (shape / "tokenizer.json").read_bytes()
    for seed in (3, 4):
        write_random_model(shape, tmp_path / f"seed-{seed}", seed)
    first_weights = (init_folder / "model.safetensors").read_bytes()
    assert (tmp_path / "seed-3" / "model.safetensors").read_bytes() == first_weights
    assert (tmp_path / "seed-4" / "model.safetensors").read_bytes() != first_weights
    first_time = (init_folder / "model.safetensors").stat().st_mtime_ns
    assert find_files(shape, tmp_path / "run", True, seed=4) == files
    assert (init_folder / "model.safetensors").stat().st_mtime_ns == first_time


def test_a_shape_that_makes_no_model_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no random model in the shape of .*m: .*validate_architecture"):
        find_files(folder_of(tmp_path / "m", {"num_attention_heads": 3}), tmp_path / "run", True)
    assert not (tmp_path / "run" / "init").exists()


@pytest.mark.parametrize(
    ("config", "generation", "listed"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 5, "top_p": 0.9}, {"eos_token_id": [5, 7], "top_p": 0.9}),
        ({}, {"eos_token_id": [6, 5], "_from_model_config": True}, {"eos_token_id": [6, 5, 7]}),
        ({}, {"eos_token_id": [5, 7]}, {"eos_token_id": [5, 7]}),
        ({"bos_token_id": 1, "eos_token_id": 2}, None, {"bos_token_id": 1, "eos_token_id": [2, 5, 7]}),
        ({"eos_token_id": None}, None, {"eos_token_id": [5, 7]}),
    ],
)
def test_end_tokens_join_those_that_a_folder_lists(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, listed: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    list_end_tokens(tmp_path, (5, 7))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == listed


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_transformers_ends_an_answer_at_a_token_that_was_added(tmp_path: Path, file: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model", "qwen3")
    prompt = torch.tensor([[5, 6, 7]])

    def sample_answer() -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(0)
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=True, top_k=0)
        return [int(token) for token in tokens[0, 3:]]

    if file == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
    unended = sample_answer()
    assert len(unended) == 8
    end = unended[3]
    list_end_tokens(folder, [end])
    assert sample_answer() == unended[: unended.index(end) + 1]
