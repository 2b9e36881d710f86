"""`trainer.compile` under Megatron compiles norms, rotary embedding and loss once, and changes nothing else."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiled import new_graphs
from tests.system.training.scenario import (
    MEGATRON,
    WeightedLoss,
    assert_compiled_trains_alike,
    open_trainer,
    run_ranks,
    sequences,
    share,
    totals,
)
from tests.tiny_models import Kind, make_model

DATA = sequences(9, seed=4)
LOSS = WeightedLoss()
pytestmark = [
    pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]
RECOMPUTE = {"activation_checkpointing": True}


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    torch.compiler.reset()


def count_variants(function: Callable[..., Any]) -> int:
    """Return the number of graphs that torch.compile has made for a function."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))  # type: ignore[attr-defined]


@pytest.mark.long  # half a minute each; compiled layers and loss of the other backend: test_lora.py
@pytest.mark.parametrize("options", [{}, RECOMPUTE])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_compiled_parts_train_alike(kind: Kind, options: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path / kind, kind)
    assert_compiled_trains_alike(tmp_path / kind, tmp_path, DATA, backend="megatron", **options)


def train_on_two_ranks(rank: int, folder: Path) -> None:
    """Train as one of two tensor-parallel ranks."""
    section = replace(MEGATRON, tensor_model_parallel_size=2)
    settings = {"backend": "megatron", "num_ranks": 2, "megatron": section}
    assert_compiled_trains_alike(folder / "qwen3", folder, DATA, rank=rank, world=2, **settings)


@pytest.mark.long  # a minute
def test_compiled_parts_of_two_tensor_ranks_train_alike(tmp_path: Path) -> None:
    make_model(tmp_path / "qwen3", "qwen3")
    run_ranks(train_on_two_ranks, tmp_path, 2)


@pytest.mark.long  # over a minute each
@pytest.mark.parametrize(("has_float32_residual", "options"), [(False, {}), (False, RECOMPUTE), (True, {})])
def test_packs_of_other_sizes_are_compiled_for_once(
    has_float32_residual: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    from rlctl.training.megatron.attention import rotate_pair
    from rlctl.training.megatron.model import rms_norm

    def train(max_tokens: int) -> None:
        trainer.log_probs(share(DATA, max_tokens))
        trainer.train([*share(DATA, max_tokens), []], LOSS, totals(DATA))

    model = make_model(tmp_path / "qwen3", "qwen3")
    options = options | {"megatron": replace(MEGATRON, fp32_residual_connection=has_float32_residual)}
    dtype = "bfloat16" if has_float32_residual else "float32"
    with open_trainer(model, tmp_path, backend="megatron", compile=True, dtype=dtype, **options) as trainer:
        # Counted as well: torch compiles again where its configuration differs, and `new_graphs` changes it.
        assert new_graphs(partial(train, 64)) > 0
        # Norms of hidden states and of heads, with gradient and without.
        assert count_variants(rms_norm) >= 4
        assert count_variants(rotate_pair) >= 2
        for max_tokens in (20, 45, 64):
            assert new_graphs(partial(train, max_tokens)) == 0
