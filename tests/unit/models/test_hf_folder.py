"""Weights are read tensor by tensor and written as folders that transformers reads back."""

import json
from pathlib import Path

import pytest
import torch

from rlctl.config.errors import ModelError
from rlctl.models import hf_folder
from rlctl.models.hf_folder import WeightFiles, write_folder
from rlctl.models.parameter_table import TensorRow
from tests.tiny_models import make_model


def whole(name: str, *shape: int) -> TensorRow:
    return TensorRow(name, shape, "float32", name, shape, (0,) * len(shape), shape)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    files = WeightFiles(make_model(tmp_path, "llama"))
    with pytest.raises(KeyError, match=r"has no tensor model\.layers\.9\.weight"):
        files.read_into([whole("model.layers.9.weight", 1)], torch.empty(1))


def test_a_tensor_of_another_shape_is_refused_not_broadcast(tmp_path: Path) -> None:
    files = WeightFiles(make_model(tmp_path, "llama"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(128,\), the configuration says"):
        files.read_into([whole("model.norm.weight", 2, 128)], torch.empty(2, 128))


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="read from safetensors only"):
        WeightFiles(tmp_path)


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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source, out = make_model(tmp_path / "source", "qwen3"), tmp_path / "out"
    (out / "model.safetensors").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors"):
        write_folder(source, out, [("a", (1,), "float32")], [("a", torch.zeros(1))])
