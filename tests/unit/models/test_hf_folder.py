"""Weights are read tensor by tensor and written as folders that transformers reads back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.config.errors import ModelError
from rlctl.models import hf_folder
from rlctl.models.derive import load_facts, table_of
from rlctl.models.hf_folder import WeightFiles, check_tied, write_folder
from rlctl.models.meta_model import language_model
from rlctl.models.parameter_table import TensorRow
from tests.system.training.scenario import open_trainer
from tests.tiny_models import make_model


def make_row(name: str, *shape: int) -> TensorRow:
    """Return the row of a tensor that is the whole target of its name."""
    return TensorRow(name, shape, dtype="float32", target=name, whole=shape, start=(0,) * len(shape), size=shape)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    files = WeightFiles(make_model(tmp_path, "llama"))
    with pytest.raises(KeyError, match=r"has no tensor model\.layers\.9\.weight"):
        files.read_into([make_row("model.layers.9.weight", 1)], torch.empty(1))


def test_a_tensor_of_another_shape_is_refused_not_broadcast(tmp_path: Path) -> None:
    files = WeightFiles(make_model(tmp_path, "llama"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(128,\), the configuration says"):
        files.read_into([make_row("model.norm.weight", 2, 128)], torch.empty(2, 128))


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it needs model\.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("row", [0, 100, 199, None], ids=["first row", "row between", "last row", "equal"])
def test_an_output_that_is_not_the_embedding_it_is_tied_to_is_refused(
    tmp_path: Path, row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_folder, "_COMPARED_ROWS", 64)
    folder = make_model(tmp_path / "m", "qwen3", tied=True, vocab=200)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if row is not None:
        head[row] += 1
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    lm = language_model(folder)
    table = table_of(lm, folder)
    facts = load_facts(folder)
    if row is None:
        check_tied(folder, table, facts)
        return
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, to which"):
        check_tied(folder, table, facts)
    with pytest.raises(ModelError, match=r"set tie_word_embeddings to false"), open_trainer(folder, tmp_path):
        pass


def test_large_weights_are_written_in_several_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    tensors = {"a": torch.randn(8), "b": torch.randn(4), "c": torch.randn(6)}
    layout = [(name, tuple(t.shape), "float32") for name, t in tensors.items()]
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 40)
    write_folder(source, tmp_path / "out", layout, tensors.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 72
    files = WeightFiles(tmp_path / "out")
    for name, tensor in tensors.items():
        assert torch.equal(files.tensor(name), tensor)


def test_a_full_disk_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder is removed below. A file that is still open would keep its disk space.
    source = make_model(tmp_path / "source", "qwen3")
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00002-of-00002.safetensors").symlink_to("/dev/full")
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 40)
    tensors = {name: torch.zeros(8) for name in "ab"}
    with pytest.raises(OSError, match="No space left on device"):
        write_folder(source, out, [(name, (8,), "float32") for name in tensors], tensors.items())
    open_files = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert Path("/dev/full") not in open_files
    assert not any(file.is_relative_to(out) for file in open_files)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    out = tmp_path / "out"
    (out / "model.safetensors").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors"):
        write_folder(source, out, [("a", (1,), "float32")], [("a", torch.zeros(1))])
