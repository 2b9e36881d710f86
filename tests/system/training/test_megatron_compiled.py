"""`trainer.compile` under Megatron: norms, rotary embedding and loss compiled once, and nothing else comes of it."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.training.scenario import (
    MEGATRON,
    WeightedLoss,
    assert_close,
    sequences,
    share,
    totals,
    trainer,
    weights,
)
from tests.tiny_models import Kind, make_model

pytest.importorskip("megatron.core")
DATA = sequences(9, seed=4)
LOSS = WeightedLoss()
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
RECOMPUTE = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {}),
        pytest.param("llama", {}, marks=pytest.mark.long),
        pytest.param("qwen3", RECOMPUTE, marks=pytest.mark.long),
        pytest.param("llama", RECOMPUTE, marks=pytest.mark.long),
    ],
)
def test_compiled_parts_train_alike(kind: Kind, options: dict[str, Any], tmp_path: Path) -> None:
    """Packs of many sizes, with passes without a gradient between."""
    make_model(tmp_path / kind, kind)
    results = []
    for on in (False, True):
        with trainer(tmp_path / kind, tmp_path, backend="megatron", compile=on, **options) as one:
            log_probs = [one.log_probs(share(DATA, most)) for most in (30, 64)]
            metrics = [one.train(share(DATA, most), LOSS, totals(DATA)) for most in (20, 45, 64)]
            results.append((log_probs, metrics, weights(one)))
    for one, other in zip(*[[row for part in found[0] for batch in part for row in batch] for found in results]):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(results[0][1], results[1][1]):
        assert_close(one, other, atol=1e-5)
    assert_close(results[0][2], results[1][2], atol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_packs_of_other_sizes_are_compiled_for_once(wide: bool, tmp_path: Path) -> None:
    import torch
    from torch._dynamo.utils import counters

    def graphs(most: int) -> int:
        before = counters["stats"]["unique_graphs"]
        one.train(share(DATA, most), LOSS, totals(DATA))
        return int(counters["stats"]["unique_graphs"] - before)

    make_model(tmp_path / "qwen3", "qwen3")
    section = replace(MEGATRON, fp32_residual_connection=wide)
    torch._dynamo.reset()
    with trainer(tmp_path / "qwen3", tmp_path, backend="megatron", megatron=section, compile=True) as one:
        # Norms of hidden states and of heads, their turning, and the loss there and back.
        assert graphs(64) >= 5
        assert [graphs(most) for most in (20, 45, 64)] == [0, 0, 0]
