"""Benches with made-up data: a user's model folder gives only the model's shape, and is not changed."""

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


def make_users_folder(parent: Path) -> Path:
    """Return a model folder whose own tokenizer has only its settings."""
    folder = parent / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"] | {"max_position_embeddings": 4096}))
    (folder / "tokenizer_config.json").write_text('{"mine": true}')
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_grpo_bench(model: str, gpus: int, modes: list[str]) -> GrpoBench:
    """Return a small bench on a machine with `gpus` GPUs."""
    return GrpoBench(
        model=model,
        installed=gpus,
        gpus=gpus,
        trainers=1,
        prompts=2,
        generations=2,
        steps=2,
        age=1,
        lengths=(32.0, 1.0, 192),
        modes=modes,
        extra=[],
    )


@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_a_users_folder_is_only_read_and_a_word_is_a_token(tmp_path: Path, tokenizer: str | None) -> None:
    users_model = make_users_folder(tmp_path)
    parent = tmp_path / "bench"
    parent.mkdir()
    if tokenizer:
        (users_model / "tokenizer.json").write_text(tokenizer)
    before = read_files(users_model)
    shape = shape_folder(str(users_model), parent)
    assert read_files(users_model) == before
    assert set(read_files(shape)) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert read_files(shape)["config.json"] == before["config.json"]
    assert read_files(shape)["tokenizer_config.json"] != before["tokenizer_config.json"]
    words = AutoTokenizer.from_pretrained(shape)
    assert len(words) == SHAPES["tiny"]["vocab_size"]
    assert len(words("w3 w31999 w17")["input_ids"]) == 3


class StoppedError(Exception):
    """Raised to end a bench before it starts a process."""


def test_the_benches_that_make_data_take_the_shape_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users_model = make_users_folder(tmp_path)
    before = read_files(users_model)
    for starter in ("subprocess.run", "rlctl.bench.workload.run_module"):
        monkeypatch.setattr(starter, Mock(side_effect=StoppedError))
    benches: list[Bench] = [
        SftBench(
            model=str(users_model),
            gpus=0,
            ranks=1,
            tokens=128,
            batch=8,
            micro_batch=8192,
            steps=1,
            modes=["eager"],
            extra=[],
        ),
        make_grpo_bench(str(users_model), gpus=0, modes=["colocated"]),
        OffloadBench(model=str(users_model), backend="fsdp", settings=[], tokens=128, batch=1, steps=1, device="cpu"),
    ]
    for bench in benches:
        assert bench.check() == []
        folder = tmp_path / type(bench).__name__
        folder.mkdir()
        with pytest.raises(StoppedError):
            bench.measure(folder, print)
        shape_files = read_files(folder / "shape")
        assert shape_files["config.json"] == before["config.json"]
        assert b"mine" not in shape_files["tokenizer_config.json"]
    assert read_files(users_model) == before


def test_one_gpu_measures_the_colocated_run_alone() -> None:
    assert make_grpo_bench("tiny", gpus=1, modes=["colocated"]).check() == []
    problems = make_grpo_bench("tiny", gpus=1, modes=["colocated", "apart", "in-flight"]).check()
    message = "apart, in-flight: needs a device for each side, and a run has 1 (--gpus); allowed: colocated"
    assert list(map(str, problems)) == [f"--modes: {message}"]
