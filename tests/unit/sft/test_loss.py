"""The SFT loss: its value and gradient, and that packing does not change them."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlctl.sft.loss import NllLoss
from rlctl.training.interface import TokenBatch, Totals


def batch(log_probs: Tensor, mask: Tensor) -> TokenBatch:
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    return TokenBatch(log_probs, torch.zeros_like(log_probs), mask, {}, zeros, 1)


def rows(seed: int, size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(size, generator=random, dtype=torch.float64)
    return log_probs.requires_grad_(), torch.rand(size, generator=random) < 0.6


def test_is_the_mean_negative_log_likelihood_of_masked_tokens() -> None:
    log_probs = torch.tensor([0.0, math.log(0.5), math.log(0.25), math.log(0.1)], dtype=torch.float64)
    mask = torch.tensor([False, True, True, False])
    output = NllLoss()(batch(log_probs, mask), Totals(tokens=2, sequences=1))
    assert output.loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert output.sums["loss/nll"].item() == output.loss.item()
    assert not output.sums["loss/nll"].requires_grad


@given(st.integers(0, 10_000), st.integers(1, 30), st.data())
@settings(max_examples=40, deadline=None)
def test_value_and_gradient_do_not_depend_on_the_packing(seed: int, size: int, data: st.DataObject) -> None:
    log_probs, mask = rows(seed, size)
    totals = Totals(tokens=max(1, int(mask.sum())), sequences=3)
    cut = data.draw(st.integers(0, size))
    parts = [NllLoss()(batch(log_probs[part], mask[part]), totals).loss for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), NllLoss()(batch(log_probs, mask), totals).loss)
    (gradient,) = torch.autograd.grad(parts[0] + parts[1], log_probs)
    torch.testing.assert_close(gradient, -mask.to(torch.float64) / totals.tokens)


def test_a_micro_batch_without_masked_tokens_adds_zero_and_keeps_its_graph() -> None:
    log_probs = torch.full((3,), float("nan")).requires_grad_()
    loss = NllLoss()(batch(log_probs, torch.zeros(3, dtype=torch.bool)), Totals(5, 1)).loss
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None and not log_probs.grad.any()


def test_an_update_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token to train on"):
        NllLoss()(batch(*rows(0, 3)), Totals(0, 1))


def test_travels_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(NllLoss())) == NllLoss()
