"""Arithmetic of an update: gradients are divided and clipped in one pass, and refused if they are not finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.training.update import divide_and_clip, gradient_norm


@given(st.floats(1e-3, 1e3), st.floats(1, 1e6), st.floats(1e-3, 1e3))
def test_gradients_are_divided_before_they_are_clipped(scale: float, normalizer: float, max_norm: float) -> None:
    gradients = [scale * torch.tensor([3.0, 0.0]), scale * torch.tensor([[4.0]])]
    norm = divide_and_clip(
        gradients, named_gradients=[], norm=5.0 * scale, loss=1.0, normalizer=normalizer, max_norm=max_norm
    )
    assert norm == pytest.approx(5.0 * scale / normalizer)
    clipped = torch.cat([gradient.flatten() for gradient in gradients])
    clipped_norm = float(clipped.norm())
    assert clipped_norm == pytest.approx(min(norm, max_norm), rel=1e-3)
    assert clipped.tolist() == pytest.approx([0.6 * clipped_norm, 0.0, 0.8 * clipped_norm])


@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [
        (math.nan, 1.0, "the loss is nan; the weights were left as they were"),
        (1.0, math.inf, r"the gradient norm is inf \(first in bad, 1 of 2 tensors\)"),
        (
            math.inf,
            math.nan,
            r"the loss is inf and the gradient norm is nan \(first in bad, 1 of 2 tensors\); the weights",
        ),
    ],
)
def test_what_is_not_finite_is_named_and_nothing_changed(loss: float, norm: float, message: str) -> None:
    gradients = {"good": torch.ones(2), "bad": torch.tensor([1.0, math.inf])}
    with pytest.raises(FloatingPointError, match=message):
        divide_and_clip(list(gradients.values()), gradients.items(), norm=norm, loss=loss, normalizer=4.0, max_norm=1.0)
    assert gradients["good"].tolist() == [1.0, 1.0]


def test_a_rank_whose_own_gradients_are_finite_says_so() -> None:
    with pytest.raises(FloatingPointError, match="gradient norm is nan \\(on another rank\\)"):
        divide_and_clip([], [("good", torch.ones(2))], norm=math.nan, loss=1.0, normalizer=4.0, max_norm=1.0)


@pytest.mark.parametrize("shapes", [[], [()], [(3,)], [(4096,), (5000, 3), (2, 2, 2)]])
def test_the_norm_is_that_of_all_gradients_together(shapes: list[tuple[int, ...]]) -> None:
    gradients = [torch.randn(shape) for shape in shapes]
    elements = torch.cat([torch.zeros(0), *[gradient.flatten() for gradient in gradients]])
    assert float(gradient_norm(gradients)) == pytest.approx(float(elements.double().norm()), rel=1e-7)


def test_the_norm_of_many_elements_loses_none_on_a_cpu() -> None:
    gradient = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).repeat(20)
    exact = float(gradient[:1_000_000].double().square().sum() * 20) ** 0.5
    assert float(gradient_norm([gradient])) == pytest.approx(exact, rel=1e-7)
    # torch's norm, summed in float32, is off by more than 1e-4.
    assert float(torch.nn.utils.get_total_norm([gradient])) != pytest.approx(exact, rel=1e-4)
