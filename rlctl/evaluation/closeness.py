"""Judgement of two ways to compute the same log-probs: equal in float32, and rounded as much below it.

A fixed bound for bfloat16 would be too wide for most models and too narrow for some: rounding grows with the depth and
with the spread of the logits. So each side is compared with float32, where the two must be equal. By the median of its
tokens neither may be farther from it than twice the other, by the mean than four times: where a router is near a tie,
rounding sends a token to another expert. Measured on a CPU, 368 tokens of each of 66 families of tests/zoo.py: the
mean of the trainer is 0.9 to 1.6 times the mean of transformers' own model. One mixture has 2.0, and a median of 1.3.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.grpo.logprob_mismatch import Floats
from rlctl.grpo.parity_check import BOUNDS

# Largest |difference| of a log-prob in nats between two float32 passes with the same weights, or this share of the mean
# rounding below: a model that rounds more in bfloat16 does so in float32.
EXACT = 1e-4
_ROUNDING_SHARE = 0.05
# Most times that a side's median and mean rounding may be the other's.
_MEDIAN_RATIO = 2.0
_MEAN_RATIO = 4.0
# An error of a log-prob is one of its token's gradient: the sum of these may be off by twice the mean.
_GRADIENT = 2.0


@dataclass(frozen=True)
class Side:
    """One way to compute log-probs, float32 [T] a sequence."""

    # Words that follow its figure in a text.
    name: str
    # In the trainer's dtype.
    rows: Floats
    # In float32 with the same weights, which the dtype rounded; None: it has no such pass.
    exact: Floats | None


class _Rounding(NamedTuple):
    """|difference| of a side's log-probs to its float32, in nats."""

    median: float
    mean: float

    @classmethod
    def from_rows(cls, rows: Floats, exact: Floats) -> "_Rounding":
        gaps = _gaps(rows, exact)
        return cls(float(np.median(gaps)), float(gaps.mean()))

    def is_like(self, other: "_Rounding") -> bool:
        """Return True if neither is much larger than the other: a side with more rounding computes something else."""
        figures = ((self.median, other.median, _MEDIAN_RATIO), (self.mean, other.mean, _MEAN_RATIO))
        return all(max(first, second) <= ratio * min(first, second) < math.inf for first, second, ratio in figures)


@dataclass(frozen=True)
class Closeness:
    """Judgement of two sides."""

    holds: bool
    text: str
    # Largest |difference| in nats, in float32 if both have that.
    worst: float
    # Mean |difference| of the first side to its float32 in nats; 0 in float32.
    rounding: float

    @property
    def gradient(self) -> float:
        """Share by which the norm of the gradient may differ."""
        return max(EXACT, _GRADIENT * self.rounding)


def compare(dtype: str, first: Side, second: Side) -> Closeness:
    """Judge two sides of the same tokens; the first of every sequence has no log-prob."""
    tokens = sum(map(len, first.rows))
    if dtype == "float32":
        worst = float(_gaps(first.rows, second.rows).max())
        text = f"log-probs of {tokens} tokens differ by {worst:.1e} at most; allowed: {EXACT:g}"
        return Closeness(worst <= EXACT, text, worst, 0.0)
    exact = second.exact if first.exact is None else first.exact
    if exact is None:
        gaps = _gaps(first.rows, second.rows)
        error = float(np.exp(gaps).mean())
        bound = BOUNDS[dtype]
        text = f"token_mult_prob_error {error:.4f} over {tokens} tokens; allowed: {bound:g}"
        return Closeness(error <= bound, text, float(gaps.max()), bound - 1)
    rounding = _Rounding.from_rows(first.rows, exact if first.exact is None else first.exact)
    other = _Rounding.from_rows(second.rows, exact if second.exact is None else second.exact)
    is_like = rounding.is_like(other)
    text = f"{dtype} is {rounding.median:.1e} from that, {other.median:.1e} {second.name}; allowed: twice as much"
    if first.exact is None or second.exact is None:
        worst = float(_gaps(first.rows, second.rows).max())
        return Closeness(is_like, f"of {tokens} log-probs in float32: {text}", worst, rounding.mean)
    worst = float(_gaps(first.exact, second.exact).max())
    bound = max(EXACT, _ROUNDING_SHARE * rounding.mean)
    exact_text = f"log-probs of {tokens} tokens differ by {worst:.1e} at most in float32; allowed: {bound:.1g}"
    return Closeness(is_like and worst <= bound, f"{exact_text}; {text}", worst, rounding.mean)


def _gaps(first: Floats, second: Floats) -> NDArray[np.float32]:
    """Return |difference| of the tokens that have a log-prob."""
    return np.concatenate([np.abs(row - other)[1:] for row, other in zip(first, second, strict=True)])
