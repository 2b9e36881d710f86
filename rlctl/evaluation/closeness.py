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
    log_probs: Floats
    # Log-probs computed in float32 with the same rounded weights; None if the side cannot do this.
    exact: Floats | None


class _Rounding(NamedTuple):
    """|difference| between a side's log-probs in its dtype and in float32, over tokens, in nats."""

    median: float
    mean: float

    @classmethod
    def measure(cls, log_probs: Floats, exact: Floats) -> "_Rounding":
        gaps = _gaps(log_probs, exact)
        return cls(float(np.median(gaps)), float(gaps.mean()))


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


def judge_sides(dtype: str, first: Side, second: Side) -> Closeness:
    """Judge two sides with log-probs of the same tokens. The first token of every sequence has no log-prob.

    dtype: the trainer's dtype.
    """
    tokens = sum(map(len, first.log_probs))
    if dtype == "float32":
        worst = float(_gaps(first.log_probs, second.log_probs).max())
        text = f"log-probs of {tokens} tokens differ by {worst:.1e} at most; allowed: {EXACT:g}"
        return Closeness(worst <= EXACT, text, worst, 0.0)
    # A side that cannot compute in float32 is measured against the other side's float32 log-probs.
    first_exact = second.exact if first.exact is None else first.exact
    second_exact = first.exact if second.exact is None else second.exact
    if first_exact is None or second_exact is None:
        gaps = _gaps(first.log_probs, second.log_probs)
        error = float(np.exp(gaps).mean())
        bound = BOUNDS[dtype]
        text = f"token_mult_prob_error {error:.4f} over {tokens} tokens; allowed: {bound:g}"
        return Closeness(error <= bound, text, float(gaps.max()), bound - 1)
    rounding = _Rounding.measure(first.log_probs, first_exact)
    other_rounding = _Rounding.measure(second.log_probs, second_exact)
    # A side with much more rounding than the other computes something else.
    has_like_medians = _are_within(rounding.median, other_rounding.median, _MEDIAN_RATIO)
    has_like_means = _are_within(rounding.mean, other_rounding.mean, _MEAN_RATIO)
    text = f"{dtype} is {rounding.median:.1e} from that, {other_rounding.median:.1e} {second.name}"
    text += "; allowed: twice as much"
    if has_like_medians and not has_like_means:
        # The medians alone would look right.
        text += f"; on average {rounding.mean:.1e}, {other_rounding.mean:.1e} {second.name}"
        text += f"; allowed: {_MEAN_RATIO:g} times as much"
    has_like_rounding = has_like_medians and has_like_means
    if first.exact is None or second.exact is None:
        worst = float(_gaps(first.log_probs, second.log_probs).max())
        return Closeness(has_like_rounding, f"of {tokens} log-probs in float32: {text}", worst, rounding.mean)
    worst = float(_gaps(first.exact, second.exact).max())
    bound = max(EXACT, _ROUNDING_SHARE * rounding.mean)
    exact_text = f"log-probs of {tokens} tokens differ by {worst:.1e} at most in float32; allowed: {bound:.1g}"
    return Closeness(has_like_rounding and worst <= bound, f"{exact_text}; {text}", worst, rounding.mean)


def _are_within(first: float, second: float, ratio: float) -> bool:
    """Return True if each of two numbers is at most `ratio` times the other. False for a NaN or an infinity."""
    return first <= ratio * second < math.inf and second <= ratio * first < math.inf


def _gaps(first: Floats, second: Floats) -> NDArray[np.float32]:
    """Return |difference| for every token but the first of each sequence, as one array."""
    return np.concatenate([np.abs(row - other)[1:] for row, other in zip(first, second, strict=True)])
