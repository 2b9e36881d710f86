"""The value loss equals its published formula, for packs of any composition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.grpo.losses.value import ValueLoss
from rlctl.training.interface import TokenBatch, Totals


def make_batch(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> TokenBatch:
    count = len(values)
    sequence = torch.zeros(count, dtype=torch.long)
    zeros = torch.zeros(count)
    return TokenBatch(
        log_probs=zeros,
        entropy=zeros,
        mask=mask,
        columns={"value": torch.stack([old, torch.full_like(old, torch.nan)], -1), "return": returns},
        sequence=sequence,
        num_sequences=1,
        rollout=sequence,
        num_rollouts=1,
        values=values,
    )


def draw(count: int, seed: int) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    old, returns, values = (torch.tensor(rng.normal(size=count)) for _ in range(3))
    mask = torch.tensor(rng.random(count) < 0.7)
    return [values, old, returns, mask]


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_formula(clip: float | None, seed: int) -> None:
    values, old, returns, mask = draw(30, seed)
    values.requires_grad_()
    output = ValueLoss(clip)(make_batch(values, old, returns, mask))
    output.loss.backward()  # type: ignore[no-untyped-call]
    total = clipped = 0.0
    gradient = np.zeros(30)
    for index in np.flatnonzero(mask.numpy()).tolist():
        v, before, target = (float(column[index].detach()) for column in (values, old, returns))
        square = (v - target) ** 2
        gradient[index] = v - target
        if clip is not None:
            bounded = min(max(v, before - clip), before + clip)
            bounded_square = (bounded - target) ** 2
            if bounded_square > square:
                clipped += 1
                square = bounded_square
                gradient[index] = 0.0
        total += square / 2
    count = float(mask.sum())
    assert output.loss.item() == pytest.approx(total, abs=1e-10)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), gradient, atol=1e-12)
    means = {name: float(total_) / float(weight) for name, (total_, weight) in output.means.items()}
    assert means["critic/loss"] == pytest.approx(total / count)
    assert means["critic/clipped"] == pytest.approx(clipped / count)
    assert means["critic/value"] == pytest.approx(values.detach()[mask].mean().item())
    assert means["critic/return"] == pytest.approx(returns[mask].mean().item())


def test_a_pack_without_sampled_tokens_has_loss_0_and_a_graph() -> None:
    values, old, returns, _ = draw(5, 0)
    values.requires_grad_()
    output = ValueLoss(0.5)(make_batch(values, old, returns, torch.zeros(5, dtype=torch.bool)))
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert output.loss.item() == 0 and values.grad is not None and not values.grad.any()


def test_it_is_divided_by_tokens_and_needs_values_and_returns() -> None:
    loss = ValueLoss(None)
    assert loss.normalizer(Totals(tokens=7, sequences=2, rollouts=2)) == 7
    assert loss.needs.columns == {"value", "return"}
    batch = make_batch(*draw(3, 0))
    batch.values = None
    with pytest.raises(ValueError, match="no values"):
        loss(batch)
