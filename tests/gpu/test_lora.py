"""Adapters on a GPU: frozen bfloat16 weights and float32 adapters in one FSDP2 group, compiled and recomputed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.system.training.scenario import (
    WeightedLoss,
    adapters_of,
    open_trainer,
    rows_of,
    sequences,
    share,
    totals,
    weights,
)
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DATA = sequences(40)
LOSS = WeightedLoss()


@dataclass(frozen=True)
class Training:
    """Metrics of three updates, and the log-probs after them."""

    metrics: list[dict[str, float]]
    log_probs: np.ndarray
    reference_log_probs: np.ndarray


def log_probs(trainer: Any, role: str = "policy") -> np.ndarray:
    return np.concatenate(rows_of(trainer.log_probs(share(DATA, 64), role)))


def train(model: Path, folder: Path, **options: Any) -> Training:
    """Train on packs of three different shapes."""
    options |= {"device": "cuda:0", "dtype": "bfloat16", "adapters": adapters_of(model)}
    with open_trainer(model, folder, **options) as trainer:
        kinds = {(parameter.requires_grad, parameter.dtype) for parameter in trainer._policy.lm.parameters()}
        assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
        metrics = [trainer.train(share(DATA, max_tokens), LOSS, totals(DATA)) for max_tokens in (30, 64, 100)]
        assert all(tensor.dtype == torch.float32 for tensor in weights(trainer).values())
        return Training(metrics, log_probs(trainer), log_probs(trainer, "reference"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_weights_and_adapters_share_a_group(checkpointing: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    eager = train(model, tmp_path, activation_checkpointing=checkpointing)
    compiled = train(model, tmp_path, activation_checkpointing=checkpointing, compile=True)
    for eager_metrics, metrics in zip(eager.metrics, compiled.metrics, strict=True):
        assert metrics["train/loss"] == pytest.approx(eager_metrics["train/loss"], abs=0.02)
        assert metrics["train/grad_norm"] == pytest.approx(eager_metrics["train/grad_norm"], rel=0.1)
    assert np.abs(eager.log_probs - compiled.log_probs).max() < 0.15
    assert np.abs(eager.reference_log_probs - compiled.reference_log_probs).max() < 0.15
    # The adapters moved the policy, and the reference is still the base.
    with open_trainer(model, tmp_path, device="cuda:0", dtype="bfloat16") as base:
        expected = log_probs(base)
    assert np.abs(eager.reference_log_probs - expected).max() < 0.05 < np.abs(eager.log_probs - expected).max()


def test_a_base_takes_two_bytes_a_parameter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "wide", "qwen3", scale=1.0, hidden=1024, layers=4, heads=8, kv_heads=8, head_dim=128)
    spec = adapters_of(model)
    nbytes = {}
    for name, adapters in (("all weights", None), ("adapters", spec)):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with open_trainer(model, tmp_path, device="cuda:0", dtype="bfloat16", adapters=adapters) as trainer:
            nbytes[name] = torch.cuda.memory_allocated() - before
            count = trainer.info()["parameters"]
        del trainer
    assert nbytes["all weights"] == pytest.approx(12 * count, rel=0.02)
    assert nbytes["adapters"] == pytest.approx(2 * count + 12 * spec.parameters, rel=0.02)
