"""`rlctl bench refit` on GPUs: every mode leaves the sent bits in vLLM's parameters, for every layout."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def measure(*arguments: str) -> dict[str, dict[str, Any]]:
    """Run `rlctl bench refit` and return its rows by their labels."""
    few = ("--eager", "--rounds", "3", "--updates", "2", "--json")
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "refit", *few, *arguments]
    bench = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert bench.returncode == 0, bench.stderr
    rows = {row["label"]: row for row in json.loads(bench.stdout)["rows"]}
    assert all(row["wrong"] == [] for row in rows.values())
    assert all(0 <= row["stall"] < 1 for label, row in rows.items() if label.startswith("rlctl"))
    return rows


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_one_device_for_trainer_and_engine(master: str) -> None:
    rows = measure("--model", "qwen3-0.6b", "--colocated", "--master", master)
    assert next(iter(rows)) == "device copy"
    assert {row["mode"] for row in rows.values()} == {"", "direct", "staged"}


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
def test_trainer_and_engine_apart() -> None:
    buffers = ("--num-buffers", "1,2")
    rows = measure("--model", "qwen3-0.6b", "--transport", "ipc,broadcast", *buffers, "--checksum", "all")
    assert len(rows) == 1 + 2 * 2 * 2


@pytest.mark.skipif("gpus() < 4", reason="needs four CUDA devices")
@pytest.mark.parametrize("model", ["qwen3-1.7b", "llama-8b"])
def test_two_trainer_ranks_to_an_engine_over_two_devices(model: str) -> None:
    shape = ("--trainers", "2", "--tensor-parallel", "2")
    assert len(measure("--model", model, *shape, "--transport", "ipc,broadcast")) == 1 + 2 * 2


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
def test_a_mixture_of_experts() -> None:
    measure("--model", "qwen3-30b-a3b", "--master", "bfloat16", "--mode", "direct")
