"""Terms that all losses use: clipped ratios, the KL term, weighted sums. Pure functions of tensors [T]."""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Bounds = tuple[float, float]

# Largest exponent: exp(20) = 4.9e8. Sums of squares of ratios up to this size stay finite in float32, and larger ratios
# would be meaningless anyway.
MAX_LOG = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) with x clipped to +-20. The gradient is 0 where x is clipped. NaN stays NaN."""
    return x.clamp(-MAX_LOG, MAX_LOG).exp()


def clip_ratio(
    ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float, dual_clip: float | None = None
) -> Tensor:
    """Return the clipped ratio b [T]: b A = min(r A, clip(r, low, high) A), and b <= `dual_clip` where A < 0.

    For A > 0 only `high` clips the ratio, for A < 0 only `low` and `dual_clip`. The gradient is that of r, and 0 where
    r is clipped (PPO, arXiv 1707.06347, equation 7; `dual_clip`: dual-clip PPO, arXiv 1912.09729).
    """
    rising = ratio.clamp(max=high)
    falling = ratio.clamp(min=low)
    if dual_clip is not None:
        falling = falling.clamp(max=dual_clip)
    return torch.where(advantage > 0, rising, falling)


def bound_by(ratio: Tensor, bounded: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bool [T]: tokens clipped by a lower bound and by an upper bound. Tokens with A = 0 do not count."""
    moves = advantage != 0
    return (ratio < bounded) & moves, (ratio > bounded) & moves


def is_within(ratio: Tensor, bounds: Bounds | None) -> Tensor:
    """Return bool [T]: true where low <= ratio <= high, and everywhere if `bounds` is None."""
    if bounds is None:
        return torch.ones_like(ratio, dtype=torch.bool)
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Return an estimate of KL(pi || ref) from x = log(ref / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x.

    Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html; k3 in GRPO: arXiv 2402.03300, equation 4.
    """
    x = log_ratio.clamp(-MAX_LOG, MAX_LOG)
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else torch.expm1(x) - x


def teacher_kl(log_ratio: Tensor, floor: float) -> Tensor:
    """Return the estimate k3 of KL(pi || teacher) from x = log(teacher / pi), x at least `floor`.

    The value is that of the bounded x, and the gradient passes through the bound. So a token that the teacher never
    says has the gradient -floor * grad log pi once it is weighted by the ratio: bounded, and of the right sign.
    """
    bounded = log_ratio + (log_ratio.clamp(min=floor) - log_ratio).detach()
    return kl_estimate(bounded, "k3")


def kl_term(weight: Tensor, estimate: Tensor, bound: float | None) -> Tensor:
    """Return weight * estimate, with the weight clipped to `bound` and the product clipped to +-`bound`.

    A clipped term has gradient 0. verl and NeMo-RL clip the estimate at 10 instead. Here the weight has a gradient too,
    so with a clipped estimate the gradient of the product could have the wrong sign.
    """
    if bound is None:
        return weight * estimate
    return (weight.clamp(max=bound) * estimate).clamp(-bound, bound)


def weighted_sums(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return sum(value * weights) of each value, by name.

    One product computes all sums. It is no matmul, which torch may compute in a lower precision such as TF32.
    """
    stacked = torch.stack([value.to(weights.dtype) for value in values.values()])
    return dict(zip(values, (stacked * weights).sum(-1)))
