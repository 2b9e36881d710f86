"""Benches with made-up data: a user's folder gives the shape, never the tokenizer, and is left as it is."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlctl.bench.models import SHAPES, shape_folder
from rlctl.bench.workload import make_tokenizer
from rlctl.cli import bench_grpo, bench_offload, bench_sft


def users_folder(parent: Path) -> Path:
    """Of a model with a tokenizer of its own, of which only the settings are there."""
    folder = parent / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"] | {"max_position_embeddings": 4096}))
    (folder / "tokenizer_config.json").write_text('{"mine": true}')
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_a_users_folder_is_only_read_and_a_word_is_a_token(tmp_path: Path, tokenizer: str | None) -> None:
    mine, parent = users_folder(tmp_path), tmp_path / "bench"
    parent.mkdir()
    if tokenizer:
        (mine / "tokenizer.json").write_text(tokenizer)
    before = files(mine)
    shape = shape_folder(str(mine), parent)
    assert files(shape) == {"config.json": before["config.json"]}
    make_tokenizer(shape)
    assert files(mine) == before
    words = AutoTokenizer.from_pretrained(shape)
    assert len(words) == SHAPES["tiny"]["vocab_size"]
    assert len(words("w3 w31999 w17")["input_ids"]) == 3


def test_the_benches_that_make_data_take_the_shape_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = users_folder(tmp_path)
    checked = [
        bench_sft._checked(str(mine), (1, None, None, 8192, 1), None, [], []),
        bench_grpo._checked(str(mine), (0, None, 2, 2, 2, 1), None, None, [], None),
        bench_offload._checked(str(mine), "fsdp", None, 1, 1, []),
    ]
    for bench, folder in checked:
        assert bench.shape.parent == folder and bench.model == str(mine)
        assert list(files(bench.shape)) == ["config.json"]
