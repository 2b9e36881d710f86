"""Terms that losses share: ratios and their bounds, the KL term, weighted sums. Pure functions of [T] tensors."""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Bounds = tuple[float, float]

# exp(20) = 4.9e8. A larger ratio is meaningless anyway, and float32 sums of squares of this one stay finite.
MAX_LOG = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) with x clipped to +-20. Outside the gradient is 0. NaN stays NaN."""
    return x.clamp(-MAX_LOG, MAX_LOG).exp()


def clip_ratio(
    ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float, dual_clip: float | None = None
) -> Tensor:
    """Return b with b A = min(r A, clip(r, low, high) A), and for A < 0 at least `dual_clip` A.

    Only the bound against A's pull can bind: `high` for A > 0, `low` and `dual_clip` for A < 0. The gradient is that of
    r, 0 where a bound binds (PPO, arXiv 1707.06347, equation 7; `dual_clip`: dual-clip PPO, arXiv 1912.09729).
    """
    rising = ratio.clamp(max=high)
    falling = ratio.clamp(min=low)
    if dual_clip is not None:
        falling = falling.clamp(max=dual_clip)
    return torch.where(advantage > 0, rising, falling)


def bound_by(ratio: Tensor, bounded: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return bool [T], twice: tokens held by a lower bound, and tokens held by an upper bound, where A is not 0."""
    moves = advantage != 0
    return (ratio < bounded) & moves, (ratio > bounded) & moves


def is_within(ratio: Tensor, bounds: Bounds | None) -> Tensor:
    """Return bool [T]: low <= ratio <= high; true everywhere without bounds."""
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


def kl_term(weight: Tensor, estimate: Tensor, bound: float | None) -> Tensor:
    """Return weight * estimate, with the weight at most `bound` and the product within +-`bound`.

    A bound that binds leaves no gradient: verl and NeMo-RL bound the estimate at 10 that way. Bounding the product
    keeps the gradient's sign. A bounded estimate would lose it, since the weight has a gradient too.
    """
    if bound is None:
        return weight * estimate
    return (weight.clamp(max=bound) * estimate).clamp(-bound, bound)


def weighted_sums(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return each value's weighted sum. One product for all; no matmul, which lower-precision settings would round."""
    stacked = torch.stack([value.to(weights.dtype) for value in values.values()])
    return dict(zip(values, (stacked * weights).sum(-1)))
