"""A trainer's pass in float32 of rounded weights, and the judgement of a gap by the rounding that it measures."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.grpo.parity_check import BOUNDS, Verdict, judge, rounding_of
from rlctl.training.micro_batching import TrainingSample
from tests.system.training.scenario import (
    WeightedLoss,
    adapters_of,
    open_trainer,
    plain_log_probs,
    sequences,
    share,
    totals,
)
from tests.tiny_models import make_model
from tests.zoo import make_family

DATA = sequences()


def rounded(folder: Path) -> Path:
    """Round a model's weights, or an adapter's, to bfloat16; they stay in float32."""
    for file in folder.glob("*.safetensors"):
        tensors = {name: value.bfloat16().float() for name, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def flat(batches: list[list[NDArray[np.float32]]] | None) -> NDArray[np.float32]:
    assert batches is not None
    return np.concatenate([row for batch in batches for row in batch])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "granite", "cohere", "gemma2"])
def test_a_pass_in_float32_is_that_of_the_rounded_weights(kind: str, tmp_path: Path) -> None:
    model, batches = make_family(tmp_path / "m", kind), share(DATA, 64)
    own = rounded(shutil.copytree(model, tmp_path / "rounded"))
    with open_trainer(own, tmp_path) as exact:
        expected = flat(exact.log_probs(batches))
    with open_trainer(model, tmp_path, dtype="bfloat16") as one:
        before = flat(one.log_probs(batches))
        np.testing.assert_allclose(flat(one.exact_log_probs(batches)), expected, atol=2e-5)
        # It leaves nothing behind.
        np.testing.assert_array_equal(flat(one.log_probs(batches)), before)
    assert np.abs(before - expected).max() > 1e-3


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.long)]
)
def test_adapters_are_rounded_too_and_options_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    model, batches = rounded(make_model(tmp_path / "m", "qwen3")), share(DATA, 64)
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, dtype="bfloat16", adapters=spec, **options) as one:
        one.train(batches, WeightedLoss(), totals(DATA))
        one.export_folder(tmp_path / "adapter")
        found = flat(one.exact_log_probs(batches))
    with open_trainer(model, tmp_path, adapters=spec, adapter=rounded(tmp_path / "adapter")) as exact:
        np.testing.assert_allclose(found, flat(exact.log_probs(batches)), atol=2e-5)


def eager(model: Path, data: list[TrainingSample], theta: float | None = None) -> list[NDArray[np.float32]]:
    """Log-probs by transformers' own kernels in bfloat16. theta: another base of its rotary embedding."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    if theta:
        rotary = lm.model.rotary_emb
        half = rotary.inv_freq.numel()
        rotary.inv_freq = theta ** -(torch.arange(half, dtype=torch.float32) / half)
    with torch.no_grad():
        return [np.concatenate([np.zeros(1, np.float32), plain_log_probs(lm, each)[0].numpy()]) for each in data]


def test_two_right_sides_of_a_deep_model_agree_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    """Kernels that round elsewhere are beyond the field's bound; so is a rotary embedding of another base."""
    model = rounded(make_model(tmp_path / "m", "qwen3", layers=24, hidden=64, head_dim=16, scale=12.0))
    data = [replace(each, mask=np.arange(len(each)) > 0) for each in sequences(40)]
    with open_trainer(model, tmp_path, dtype="bfloat16", micro_batch_tokens=1024) as one:
        own = [row for batch in one.log_probs([data]) for row in batch]
        exact = [row for batch in one.exact_log_probs([data]) for row in batch]
    mask = [each.mask for each in data]

    def verdict(side: list[NDArray[np.float32]]) -> tuple[float, Verdict]:
        gap = mismatch(side, own, mask)
        return gap.token_mult_prob_error, judge(gap, "bfloat16", lambda: rounding_of(side, own, exact, mask))

    (right, agreed), (wrong, refused) = verdict(eager(model, data)), verdict(eager(model, data, theta=3e3))
    assert min(right, wrong) > BOUNDS["bfloat16"]
    assert agreed.agree and agreed.explanation.startswith("the same weights in float32 are 1.")
    assert not refused.agree
    # A right side within the bound needs no second pass.
    assert judge(mismatch(own, own, mask), "bfloat16", lambda: pytest.fail("measured")) == Verdict(True)
