"""What the driver reads of a model folder, and the random model it makes in another's shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import ModelSection
from rlctl.models.meta_model import write_random_model
from rlctl.models.model_files import ModelFiles
from tests.tiny_models import make_model
from tests.unit.folders import weights

FACTS = {"max_position_embeddings": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
FACTS |= {"intermediate_size": 64, "vocab_size": 32}


def folder_of(root: Path, config: dict[str, Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", **FACTS, **config}))
    (root / "model.safetensors").write_bytes(weights())
    return root


def find(folder: Path, run: Path, random_init: bool = False, seed: int = 0) -> ModelFiles:
    return ModelFiles.find(ModelSection(str(folder), None, random_init, None), run, seed)


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"eos_token_id": 7})
    assert find(folder, tmp_path / "run") == ModelFiles(str(folder), str(folder), 512, 3, 64)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("head_dim", "hidden"), [({}, 64), ({"head_dim": None}, 64), ({"head_dim": 32}, 128)])
def test_hidden_is_heads_times_their_size(tmp_path: Path, head_dim: dict[str, int | None], hidden: int) -> None:
    assert find(folder_of(tmp_path / "m", head_dim), tmp_path).hidden == hidden


@pytest.mark.slow
def test_a_random_model_is_made_once_in_the_run_directory_and_the_seed_decides_its_bytes(tmp_path: Path) -> None:
    shape = make_model(tmp_path / "shape", "qwen2")
    files = find(shape, tmp_path / "run", True, seed=3)
    made = Path(files.folder)
    assert made == tmp_path / "run" / "init"
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
