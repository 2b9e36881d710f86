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
EXACT, _ROUNDING_SHARE = 1e-4, 0.05
# Most times that a side's usual and mean rounding may be the other's.
_USUAL, _MEAN = 2.0, 4.0
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

    usual: float
    mean: float

    @classmethod
    def from_rows(cls, rows: Floats, exact: Floats) -> "_Rounding":
        gaps = _gaps(rows, exact)
        return cls(float(np.median(gaps)), float(gaps.mean()))

    def is_like(self, other: "_Rounding") -> bool:
        """Return True if neither is much larger than the other: a side that is computes something else."""
        figures = ((self.usual, other.usual, _USUAL), (self.mean, other.mean, _MEAN))
        return all(max(pair) <= most * min(pair) < math.inf for *pair, most in figures)


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
        error, bound, worst = float(np.exp(gaps).mean()), BOUNDS[dtype], float(gaps.max())
        text = f"token_mult_prob_error {error:.4f} over {tokens} tokens; allowed: {bound:g}"
        return Closeness(error <= bound, text, worst, bound - 1)
    own, other = (
        _Rounding.from_rows(each.rows, exact if each.exact is None else each.exact) for each in (first, second)
    )
    said = f"{dtype} is {own.usual:.1e} from that, {other.usual:.1e} {second.name}; allowed: twice as much"
    if first.exact is None or second.exact is None:
        worst = float(_gaps(first.rows, second.rows).max())
        return Closeness(own.is_like(other), f"of {tokens} log-probs in float32: {said}", worst, own.mean)
    worst, most = float(_gaps(first.exact, second.exact).max()), max(EXACT, _ROUNDING_SHARE * own.mean)
    text = f"log-probs of {tokens} tokens differ by {worst:.1e} at most in float32; allowed: {most:.1g}; {said}"
    return Closeness(own.is_like(other) and worst <= most, text, worst, own.mean)


def _gaps(one: Floats, other: Floats) -> NDArray[np.float32]:
    """Return |difference| of the tokens that have a log-prob."""
    return np.concatenate([np.abs(a - b)[1:] for a, b in zip(one, other, strict=True)])
