"""`trainer.compile` under Megatron: norms, rotary embedding and loss compiled once, and nothing else comes of it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.fixture(autouse=True)
def never_uncompiled() -> Iterator[None]:
    """What torch would run as it is, having compiled too often, is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def variants(function: Callable[..., Any]) -> int:
    """How many graphs there are of it."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(
    ("wide", "options"),
    [
        (False, {}),
        pytest.param(False, RECOMPUTE, marks=pytest.mark.long),
        pytest.param(True, {}, marks=pytest.mark.long),
    ],
)
def test_packs_of_other_sizes_are_compiled_for_once(wide: bool, options: dict[str, Any], tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    from rlctl.training.megatron.attention import turned
    from rlctl.training.megatron.model import rms_norm

    def graphs(most: int) -> int:
        before = counters["stats"]["unique_graphs"]
        one.log_probs(share(DATA, most))
        one.train([*share(DATA, most), []], LOSS, totals(DATA))
        return int(counters["stats"]["unique_graphs"] - before)

    make_model(tmp_path / "qwen3", "qwen3")
    options = options | {"megatron": replace(MEGATRON, fp32_residual_connection=wide)}
    dtype = "bfloat16" if wide else "float32"
    with trainer(tmp_path / "qwen3", tmp_path, backend="megatron", compile=True, dtype=dtype, **options) as one:
        graphs(64)
        # Norms of hidden states and of heads, with gradient and without.
        assert variants(rms_norm) >= 4
        assert variants(turned) >= 2
        assert [graphs(most) for most in (20, 45, 64)] == [0, 0, 0]
