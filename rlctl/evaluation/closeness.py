"""Judgement of two ways (sides) to compute the same log-probs: equal in float32, and with equal rounding in bfloat16.

A fixed bound for bfloat16 would be too wide for most models and too narrow for some, because rounding grows with the
depth and with the spread of the logits. So both sides must be equal in float32. A side's rounding is the distance of
its bfloat16 log-probs from float32. The median rounding over tokens of one side may be at most twice the other's, and
the mean at most four times. The mean has a wider bound, because near a router's tie rounding sends a token to another
expert. Measured on a CPU with 368 tokens of each of 66 families of tests/zoo.py: the mean of the trainer is 0.9 to 1.6
times the mean of transformers' own model. One mixture has 2.0, with a median of 1.3 times.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.grpo.logprob_mismatch import Floats
from rlctl.grpo.parity_check import BOUNDS

# Largest |difference| of a log-prob, in nats, between two float32 passes with the same weights. This share of the mean
# rounding in bfloat16 is allowed too, because a model with more rounding in bfloat16 has more in float32.
EXACT = 1e-4
_ROUNDING_SHARE = 0.05
# Largest ratio of the two sides' median roundings, and of their mean roundings.
_MEDIAN_RATIO = 2.0
_MEAN_RATIO = 4.0
# Allowed relative error of a gradient's norm, as a multiple of the mean error of a log-prob.
_GRADIENT = 2.0


@dataclass(frozen=True)
class Side:
    """One way to compute log-probs, and its results, float32 [T] for each sequence."""

    # Words behind the side's figure in a text, for example `alone`.
    name: str
    # Log-probs computed in the trainer's dtype.
    rows: Floats
    # Log-probs computed in float32 with the same rounded weights; None if the side cannot do this.
    exact: Floats | None


class _Rounding(NamedTuple):
    """|difference| between a side's log-probs in its dtype and in float32, over tokens, in nats."""

    median: float
    mean: float

    @classmethod
    def from_rows(cls, rows: Floats, exact: Floats) -> "_Rounding":
        gaps = _gaps(rows, exact)
        return cls(float(np.median(gaps)), float(gaps.mean()))

    def is_like(self, other: "_Rounding") -> bool:
        """Return True if neither rounding is much larger. A side with much more rounding computes something else."""
        figures = ((self.median, other.median, _MEDIAN_RATIO), (self.mean, other.mean, _MEAN_RATIO))
        return all(max(first, second) <= ratio * min(first, second) < math.inf for first, second, ratio in figures)


@dataclass(frozen=True)
class Closeness:
    """Judgement of two sides."""

    # True if the sides agree.
    holds: bool
    text: str
    # Largest |difference| between the sides in nats, computed in float32 if both sides can.
    worst: float
    # Mean |difference| between the first side and float32 in nats; 0 if the dtype is float32.
    rounding: float

    @property
    def gradient(self) -> float:
        """Allowed relative difference of the norm of the gradient."""
        return max(EXACT, _GRADIENT * self.rounding)


def compare(dtype: str, first: Side, second: Side) -> Closeness:
    """Judge two sides with log-probs of the same tokens. The first token of every sequence has no log-prob.

    dtype: the trainer's dtype.
    """
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
    """Return |difference| for every token but the first of each sequence, as one array."""
    return np.concatenate([np.abs(row - other)[1:] for row, other in zip(first, second, strict=True)])
