"""The SFT loss: its value and gradient, and that packing does not change them."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlctl.config.role_schema import DistillationSection
from rlctl.sft.loss import NllLoss
from rlctl.training.interface import TokenBatch, Totals


def make_batch(log_probs: Tensor, mask: Tensor) -> TokenBatch:
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    return TokenBatch(log_probs, torch.zeros_like(log_probs), mask, {}, zeros, 1, zeros, 1)


def draw_tokens(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random log-probs and a mask."""
    random = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(size, generator=random, dtype=torch.float64)
    return log_probs.requires_grad_(), torch.rand(size, generator=random) < 0.6


def test_is_the_mean_negative_log_likelihood_of_masked_tokens() -> None:
    log_probs = torch.tensor([0.0, math.log(0.5), math.log(0.25), math.log(0.1)], dtype=torch.float64)
    mask = torch.tensor([False, True, True, False])
    output = NllLoss()(make_batch(log_probs, mask))
    assert output.loss.item() / NllLoss().normalizer(Totals(2, 1, 1)) == pytest.approx((math.log(2) + math.log(4)) / 2)
    total, weight = output.means["loss/nll"]
    assert (total.item(), weight.item()) == (output.loss.item(), 2)
    assert not total.requires_grad


@pytest.mark.parametrize("nll_coef", [0.0, 0.5])
def test_the_divergence_from_a_teacher_is_added_by_its_weight(nll_coef: float) -> None:
    log_probs, mask = draw_tokens(1, 5)
    divergence = torch.arange(5, dtype=torch.float64).where(mask, 0).requires_grad_()
    term = DistillationSection(
        coef=3.0,
        over="vocabulary",
        divergence="forward_kl",
        beta=0.5,
        num_top_tokens=20,
        rest="bin",
        log_ratio_floor=-10.0,
    )
    loss = NllLoss(nll_coef, term)
    assert loss.needs.divergence == term and NllLoss().needs.divergence is None
    batch = make_batch(log_probs, mask)
    batch.divergence = divergence
    output = loss(batch)
    nll, count = output.means["loss/nll"]
    torch.testing.assert_close(output.loss, nll_coef * nll + 3 * divergence.sum())
    assert output.means["loss/teacher"] == (divergence.sum(), count)
    gradients = torch.autograd.grad(output.loss, (log_probs, divergence))
    torch.testing.assert_close(gradients[0], -nll_coef * mask.to(torch.float64))
    torch.testing.assert_close(gradients[1], torch.full((5,), 3.0, dtype=torch.float64))


@given(st.integers(0, 10_000), st.integers(1, 30), st.data())
@settings(max_examples=40, deadline=None)
def test_value_and_gradient_do_not_depend_on_the_packing(seed: int, size: int, draws: st.DataObject) -> None:
    log_probs, mask = draw_tokens(seed, size)
    cut = draws.draw(st.integers(0, size))
    parts = [NllLoss()(make_batch(log_probs[part], mask[part])).loss for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), NllLoss()(make_batch(log_probs, mask)).loss)
    (gradient,) = torch.autograd.grad(parts[0] + parts[1], log_probs)
    torch.testing.assert_close(gradient, -mask.to(torch.float64))


def test_a_micro_batch_without_masked_tokens_adds_zero_and_keeps_its_graph() -> None:
    log_probs = torch.full((3,), float("nan")).requires_grad_()
    loss = NllLoss()(make_batch(log_probs, torch.zeros(3, dtype=torch.bool))).loss
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None and not log_probs.grad.any()


def test_without_tokens_there_is_nothing_to_divide_by() -> None:
    assert NllLoss().normalizer(Totals(0, 1, 1)) == 0


def test_travels_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(NllLoss())) == NllLoss()
