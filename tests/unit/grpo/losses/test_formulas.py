"""Each loss and its gradient equal a plain loop by its paper's formula, to 1e-9, for all options and rollouts."""

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.plugins import LOSSES
from rlctl.grpo.losses.check import made_up_rows, outcome, pack_rows, totals_of
from tests.unit.grpo.losses.drawn import DEFAULTS, load_loss, options, shapes
from tests.unit.grpo.losses.references import POLICY, reference


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data(), seed=st.integers(0, 10_000), lengths=shapes)
@settings(max_examples=25, deadline=None)
def test_loss_and_gradient_equal_the_papers_formula(
    name: str, data: st.DataObject, seed: int, lengths: list[list[int]]
) -> None:
    loss = data.draw(options(name))
    rows = made_up_rows(seed, lengths)
    measured = outcome(loss, [rows], rows)
    expected, terms = reference(loss, rows)
    assert measured.loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    leaves = []
    for row in rows:
        leaves += [row.log_probs, row.entropy]
    leaves += [row.divergence for row in rows]
    expected_gradients = [torch.zeros_like(leaf) for leaf in leaves]
    if expected.requires_grad:
        expected_gradients = list(torch.autograd.grad(expected, leaves, materialize_grads=True))
    for gradient, expected_gradient in zip(measured.gradients + measured.divergence_gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    if not isinstance(loss.mean_over, float):
        assert measured.means.get("loss/policy", 0) == pytest.approx(terms["loss/policy"], rel=1e-9, abs=1e-12)
        assert measured.means.get("loss/teacher", 0) == pytest.approx(terms["loss/teacher"])
        assert measured.means.get("loss/kl", 0) == pytest.approx(terms["loss/kl"] if loss.kl_coef else 0)


def test_no_reference_is_longer_than_20_lines() -> None:
    assert all(len(inspect.getsource(formula).splitlines()) <= 20 for formula in POLICY.values())
    assert {type(loss).__name__ for loss in DEFAULTS.values()} == set(POLICY)


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_the_rows_of_a_rollout_weigh_as_one_row(name: str) -> None:
    """A rollout that is cut into two rows has the same loss as the rollout in one row."""
    overrides = [f"grpo.loss={name}"]
    if name == "grpo":
        overrides.append("grpo.loss.reduction=sequence")
    loss = load_loss(*overrides)
    uncut = made_up_rows(3, [[9], [6]])
    for row in uncut:
        row.mask[4] = False
    first = uncut[0]
    parts = [
        replace(
            first, log_probs=first.log_probs[part], entropy=first.entropy[part], divergence=first.divergence[part],
            mask=first.mask[part], columns={key: column[part] for key, column in first.columns.items()},
        )
        for part in (slice(0, 4), slice(4, 9))
    ]  # fmt: skip
    rows = [*parts, uncut[1]]
    value = loss(pack_rows(rows)).loss / loss.normalizer(totals_of(rows))
    assert value.item() == pytest.approx(outcome(loss, [uncut], uncut).loss, rel=1e-12)
