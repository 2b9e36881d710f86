"""Benches with made-up data: a user's folder gives the shape, never the tokenizer, and is left as it is."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from rlctl.bench.frame import Bench
from rlctl.bench.grpo import GrpoBench
from rlctl.bench.offload import OffloadBench
from rlctl.bench.sft import SftBench
from rlctl.bench.workload import SHAPES, shape_folder


def users_folder(parent: Path) -> Path:
    """Return a model folder whose own tokenizer has only its settings."""
    folder = parent / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"] | {"max_position_embeddings": 4096}))
    (folder / "tokenizer_config.json").write_text('{"mine": true}')
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_a_users_folder_is_only_read_and_a_word_is_a_token(tmp_path: Path, tokenizer: str | None) -> None:
    mine = users_folder(tmp_path)
    parent = tmp_path / "bench"
    parent.mkdir()
    if tokenizer:
        (mine / "tokenizer.json").write_text(tokenizer)
    before = files(mine)
    shape = shape_folder(str(mine), parent)
    assert files(mine) == before
    assert set(files(shape)) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files(shape)["config.json"] == before["config.json"]
    assert files(shape)["tokenizer_config.json"] != before["tokenizer_config.json"]
    words = AutoTokenizer.from_pretrained(shape)
    assert len(words) == SHAPES["tiny"]["vocab_size"]
    assert len(words("w3 w31999 w17")["input_ids"]) == 3


class Stopped(Exception):
    pass


def test_the_benches_that_make_data_take_the_shape_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = users_folder(tmp_path)
    before = files(mine)
    for starter in ("subprocess.run", "rlctl.bench.workload.run_module"):
        monkeypatch.setattr(starter, Mock(side_effect=Stopped))
    benches: list[Bench] = [
        SftBench(str(mine), 0, 1, 128, 8, 8192, 1, ["eager"], []),
        GrpoBench(str(mine), 0, 0, 1, 2, 2, 2, 1, (32.0, 1.0, 192), ["colocated"], []),
        OffloadBench(str(mine), "fsdp", [], 128, 1, 1, "cpu"),
    ]
    for bench in benches:
        assert bench.check() == []
        folder = tmp_path / type(bench).__name__
        folder.mkdir()
        with pytest.raises(Stopped):
            bench.measure(folder, print)
        shape = files(folder / "shape")
        assert shape["config.json"] == before["config.json"]
        assert b"mine" not in shape["tokenizer_config.json"]
    assert files(mine) == before


def test_one_gpu_measures_the_colocated_run_alone() -> None:
    def problems(modes: list[str]) -> list[str]:
        return [str(each) for each in GrpoBench("tiny", 1, 1, 1, 2, 2, 2, 1, (32.0, 1.0, 192), modes, []).check()]

    assert problems(["colocated"]) == []
    what = "apart, in-flight: needs a device for each side, and a run has 1 (--gpus); allowed: colocated"
    assert problems(["colocated", "apart", "in-flight"]) == [f"--modes: {what}"]
