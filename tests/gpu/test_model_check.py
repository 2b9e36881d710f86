"""`rlctl model check --engine` on a GPU: a compiled engine with CUDA graphs gives the trainer's log-probs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_model
from tests.zoo import make_family

pytestmark = pytest.mark.gpu
# Heads of each kind of attention kernel. FlashAttention 3 takes other ways for 64, 128 and 256.
MODELS: dict[str, dict[str, Any]] = {
    f"qwen3, heads of {dim}": {"hidden": 256, "head_dim": dim} for dim in (64, 128, 256)
}


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check(folder: Path) -> None:
    command = [sys.executable, "-m", "rlctl.cli.main", "model", "check", str(folder), "--engine"]
    environment = os.environ | {"COLUMNS": "200"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_heads_of_every_size_agree(name: str, tmp_path: Path) -> None:
    check(make_model(tmp_path / "model", "qwen3", **MODELS[name]))


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_mixtures_of_experts_agree(family: str, tmp_path: Path) -> None:
    make_family(tmp_path / "model", family)
    check(tmp_path / "model")
