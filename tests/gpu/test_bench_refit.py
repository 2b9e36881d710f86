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


def rows(*arguments: str) -> dict[str, dict[str, Any]]:
    few = ("--eager", "--rounds", "3", "--updates", "2", "--json")
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "refit", *few, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr
    found = {row["label"]: row for row in json.loads(result.stdout)["rows"]}
    assert all(row["wrong"] == [] for row in found.values())
    assert all(0 <= row["stall"] < 1 for label, row in found.items() if label.startswith("rlctl"))
    return found


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_one_device_for_trainer_and_engine(master: str) -> None:
    found = rows("--model", "qwen3-0.6b", "--colocated", "--master", master)
    assert next(iter(found)) == "device copy"
    assert {row["mode"] for row in found.values()} == {"", "direct", "staged"}


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
def test_trainer_and_engine_apart() -> None:
    found = rows("--model", "qwen3-0.6b", "--transport", "ipc,broadcast", "--num-buffers", "1,2", "--checksum", "all")
    assert len(found) == 1 + 2 * 2 * 2


@pytest.mark.skipif("gpus() < 4", reason="needs four CUDA devices")
@pytest.mark.parametrize("model", ["qwen3-1.7b", "llama-8b"])
def test_two_trainer_ranks_to_an_engine_over_two_devices(model: str) -> None:
    shape = ("--trainers", "2", "--tensor-parallel", "2")
    assert len(rows("--model", model, *shape, "--transport", "ipc,broadcast")) == 1 + 2 * 2


@pytest.mark.skipif("gpus() < 2", reason="needs two CUDA devices")
def test_a_mixture_of_experts() -> None:
    rows("--model", "qwen3-30b-a3b", "--master", "bfloat16", "--mode", "direct")
