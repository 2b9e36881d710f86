"""A trainer's float32 pass with rounded weights, and the judgement of a gap by the rounding that this pass measures."""

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
    rows_of,
    sequences,
    share,
    totals,
)
from tests.tiny_models import make_model
from tests.zoo import make_family

DATA = sequences()


def round_weights(folder: Path) -> Path:
    """Round the weights of a model or adapter to bfloat16 values, stored as float32."""
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def join_rows(batches: list[list[NDArray[np.float32]]] | None) -> NDArray[np.float32]:
    """Return the values of all rows of all micro-batches in one array."""
    assert batches is not None
    return np.concatenate(rows_of(batches))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "granite", "cohere", "gemma2"])
def test_a_pass_in_float32_is_that_of_the_rounded_weights(kind: str, tmp_path: Path) -> None:
    model = make_family(tmp_path / "m", kind)
    batches = share(DATA, 64)
    rounded_model = round_weights(shutil.copytree(model, tmp_path / "rounded"))
    with open_trainer(rounded_model, tmp_path) as float32_trainer:
        expected = join_rows(float32_trainer.log_probs(batches))
    with open_trainer(model, tmp_path, dtype="bfloat16") as trainer:
        before = join_rows(trainer.log_probs(batches))
        np.testing.assert_allclose(join_rows(trainer.exact_log_probs(batches)), expected, atol=2e-5)
        # The exact pass leaves nothing behind.
        np.testing.assert_array_equal(join_rows(trainer.log_probs(batches)), before)
    assert np.abs(before - expected).max() > 1e-3


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.long)]
)
def test_adapters_are_rounded_too_and_options_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    model = round_weights(make_model(tmp_path / "m", "qwen3"))
    batches = share(DATA, 64)
    spec = adapters_of(model)
    with open_trainer(model, tmp_path, dtype="bfloat16", adapters=spec, **options) as trainer:
        trainer.train(batches, WeightedLoss(), totals(DATA))
        trainer.export_folder(tmp_path / "adapter")
        exact = join_rows(trainer.exact_log_probs(batches))
    rounded_adapter = round_weights(tmp_path / "adapter")
    with open_trainer(model, tmp_path, adapters=spec, adapter=rounded_adapter) as float32_trainer:
        np.testing.assert_allclose(exact, join_rows(float32_trainer.log_probs(batches)), atol=2e-5)


def compute_eagerly(
    model: Path, samples: list[TrainingSample], theta: float | None = None
) -> list[NDArray[np.float32]]:
    """Compute log-probs by transformers' own kernels in bfloat16. theta: another base of its rotary embedding."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    if theta:
        rotary = lm.model.rotary_emb
        half = rotary.inv_freq.numel()
        rotary.inv_freq = theta ** -(torch.arange(half, dtype=torch.float32) / half)
    first = np.zeros(1, np.float32)
    with torch.no_grad():
        return [np.concatenate([first, plain_log_probs(lm, sample)[0].numpy()]) for sample in samples]


def test_two_right_sides_of_a_deep_model_agree_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    """Rounding of other kernels exceeds the usual bound, and so does a rotary embedding with another base."""
    model = round_weights(make_model(tmp_path / "m", "qwen3", layers=24, hidden=64, head_dim=16, scale=12.0))
    samples = [replace(sample, mask=np.arange(len(sample)) > 0) for sample in sequences(40)]
    with open_trainer(model, tmp_path, dtype="bfloat16", micro_batch_tokens=1024) as trainer:
        trainer_rows = rows_of(trainer.log_probs([samples]))
        exact_rows = rows_of(trainer.exact_log_probs([samples]))
    masks = [sample.mask for sample in samples]

    def judge_side(rows: list[NDArray[np.float32]]) -> tuple[float, Verdict]:
        gap = mismatch(rows, trainer_rows, masks)
        verdict = judge(gap, "bfloat16", lambda: rounding_of(rows, trainer_rows, exact_rows, masks))
        return gap.token_mult_prob_error, verdict

    right_error, right_verdict = judge_side(compute_eagerly(model, samples))
    wrong_error, wrong_verdict = judge_side(compute_eagerly(model, samples, theta=3e3))
    assert min(right_error, wrong_error) > BOUNDS["bfloat16"]
    assert right_verdict.agree and right_verdict.explanation.startswith("the same weights in float32 are 1.")
    assert not wrong_verdict.agree
    # A right side within the bound needs no second pass.
    no_gap = mismatch(trainer_rows, trainer_rows, masks)
    assert judge(no_gap, "bfloat16", lambda: pytest.fail("measured")) == Verdict(True)
