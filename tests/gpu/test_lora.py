"""Adapters on a GPU: frozen bfloat16 weights and float32 adapters in one FSDP2 group, compiled and recomputed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.system.training.scenario import WeightedLoss, adapters_of, open_trainer, sequences, share, totals, weights
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DATA, LOSS = sequences(40), WeightedLoss()


def log_probs(one: Any, role: str = "policy") -> np.ndarray:
    return np.concatenate([row for batch in one.log_probs(share(DATA, 64), role) for row in batch])


def trained(model: Path, folder: Path, **options: Any) -> tuple[list[dict[str, float]], np.ndarray, np.ndarray]:
    """Metrics of three updates whose packs have other shapes each, log-probs after them, and the reference's."""
    with open_trainer(model, folder, device="cuda:0", dtype="bfloat16", adapters=adapters_of(model), **options) as one:
        assert {(p.requires_grad, p.dtype) for p in one._policy.lm.parameters()} == {
            (False, torch.bfloat16), (True, torch.float32),
        }  # fmt: skip
        metrics = [one.train(share(DATA, most), LOSS, totals(DATA)) for most in (30, 64, 100)]
        assert all(value.dtype == torch.float32 for value in weights(one).values())
        return metrics, log_probs(one), log_probs(one, "reference")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_weights_and_adapters_share_a_group(checkpointing: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    eager = trained(model, tmp_path, activation_checkpointing=checkpointing)
    compiled = trained(model, tmp_path, activation_checkpointing=checkpointing, compile=True)
    for one, other in zip(eager[0], compiled[0], strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=0.02)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=0.1)
    for before, after in zip(eager[1:], compiled[1:]):
        assert np.abs(before - after).max() < 0.15
    # The adapters moved the policy, and the reference is still the base.
    with open_trainer(model, tmp_path, device="cuda:0", dtype="bfloat16") as base:
        expected = log_probs(base)
    assert np.abs(eager[2] - expected).max() < 0.05 < np.abs(eager[1] - expected).max()


def test_a_base_takes_two_bytes_a_parameter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "wide", "qwen3", scale=1.0, hidden=1024, layers=4, heads=8, kv_heads=8, head_dim=128)
    spec, held = adapters_of(model), {}
    for name, adapters in (("whole", None), ("adapters", spec)):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with open_trainer(model, tmp_path, device="cuda:0", dtype="bfloat16", adapters=adapters) as one:
            held[name] = torch.cuda.memory_allocated() - before
            count = one.info()["parameters"]
        del one
    assert held["whole"] == pytest.approx(12 * count, rel=0.02)
    assert held["adapters"] == pytest.approx(2 * count + 12 * spec.parameters, rel=0.02)
