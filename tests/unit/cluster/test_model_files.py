"""What the driver reads of a model folder, and the random model it makes in another's shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.cluster.model_files import ModelFiles
from rlctl.config.schema import ModelSection
from rlctl.training.random_init import write_random_model
from tests.tiny_models import EOS, make_model
from tests.unit.config.folders import weights

FACTS = {"max_position_embeddings": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
FACTS |= {"intermediate_size": 64, "vocab_size": 32}


def folder_of(root: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", **FACTS, **config}))
    (root / "model.safetensors").write_bytes(weights())
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps(generation))
    return root


def find(folder: Path, run: Path, random_init: bool = False, seed: int = 0) -> ModelFiles:
    return ModelFiles.find(ModelSection(str(folder), None, random_init, None), run, seed)


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"eos_token_id": 7})
    assert find(folder, tmp_path / "run") == ModelFiles(str(folder), str(folder), 512, (7,), 3, 64)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("head_dim", "hidden"), [({}, 64), ({"head_dim": None}, 64), ({"head_dim": 32}, 128)])
def test_hidden_is_heads_times_their_size(tmp_path: Path, head_dim: dict[str, int | None], hidden: int) -> None:
    assert find(folder_of(tmp_path / "m", head_dim), tmp_path).hidden == hidden


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 7}, {"temperature": 0.6}, (7,)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": None}, None, ()),
        ({}, None, ()),
    ],
)
def test_end_tokens_are_those_of_generation_before_those_of_the_model(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    assert find(folder_of(tmp_path / "m", config, generation), tmp_path).stop_token_ids == stops


@pytest.mark.slow
def test_a_random_model_is_made_once_in_the_run_directory_and_the_seed_decides_its_bytes(tmp_path: Path) -> None:
    shape = make_model(tmp_path / "shape", "qwen2")
    files = find(shape, tmp_path / "run", True, seed=3)
    made = Path(files.folder)
    assert (made, files.stop_token_ids) == (tmp_path / "run" / "init", (EOS,))
    assert (made / "tokenizer.json").read_bytes() == (shape / "tokenizer.json").read_bytes()
    for seed in (3, 4):
        write_random_model(shape, tmp_path / f"seed-{seed}", seed)
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (made, tmp_path / "seed-3", tmp_path / "seed-4")
    ]
    assert weights[0] == weights[1] != weights[2]
    begin = (made / "model.safetensors").stat().st_mtime_ns
    assert find(shape, tmp_path / "run", True, seed=4) == files
    assert (made / "model.safetensors").stat().st_mtime_ns == begin


def test_a_shape_that_makes_no_model_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no random model in the shape of .*m: .*validate_architecture"):
        find(folder_of(tmp_path / "m", {"num_attention_heads": 3}), tmp_path / "run", True)
    assert not (tmp_path / "run" / "init").exists()
