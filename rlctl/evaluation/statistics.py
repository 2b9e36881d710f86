"""Statistics of an evaluation: pass@k, intervals at 95%, the paired test of a difference. Pure.

Tasks are the independent units: answers to one task depend on each other, so errors are computed over task means
(Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, lcm, sqrt

import numpy as np
from numpy.typing import NDArray

# Standard normal quantile of a two-sided interval at 95%.
_Z = 1.959963984540054
# Values that the exact distribution of a test may have; beyond that signs are drawn.
_MOST_VALUES = 4_000_000
_DRAWS = 20_000


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its interval at 95%."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The mean difference of two evaluations of the same tasks, second minus first."""

    mean: float
    # Interval at 95%.
    low: float
    high: float
    # Probability of a difference at least as large if both were equally good; two-sided.
    p_value: float
    # Numbers of tasks at which the second is better, worse, equal.
    better: int
    worse: int
    equal: int


def pass_at(k: int, samples: int, right: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n-c, k) / C(n, k) of n samples with c right.

    The probability that at least one of k answers, drawn without repetition, is right. Source: Chen et al., arXiv
    2107.03374, equation 1. Raises ValueError for more than n answers.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be from 1 to {samples}")
    return float(1 - Fraction(comb(samples - right, k), comb(samples, k)))


def share(value: float, means: Sequence[float], answers: int) -> Estimate:
    """Return the interval of `value`, a share (0 to 1) whose parts by task are `means`: Wilson's score interval.

    The number of trials is the effective one, v (1 - v) / s^2, with s the standard error over tasks. With one answer
    to each task that is the number of tasks. Source: Wilson, JASA 22 (1927), 209; Brown et al., Statistical Science 16
    (2001), 101.
    """
    rows = np.asarray(means, np.float64)
    variance = float(rows.var()) / len(rows)
    spread = value * (1 - value)
    trials = float(len(rows)) if spread <= 0 else min(float(answers), spread / variance if variance else answers)
    centre = (value + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z / (1 + _Z**2 / trials) * sqrt(max(0.0, spread) / trials + _Z**2 / (4 * trials**2))
    return Estimate(value, min(value, max(0.0, centre - half)), max(value, min(1.0, centre + half)))


def mean(value: float, means: Sequence[float]) -> Estimate:
    """Return the normal interval of `value`, a mean whose parts by task are `means`."""
    half = _Z * _standard_error(np.asarray(means, np.float64))
    return Estimate(value, value - half, value + half)


def paired(first: Sequence[Fraction | float], second: Sequence[Fraction | float]) -> Difference:
    """Compare two evaluations, given by their means at the same tasks, in the same order.

    The test is Fisher's: if both are equally good, each difference could as well have the other sign. Its distribution
    is computed exactly for fractions; with one answer to each task it is the sign test, McNemar's exact one. For other
    numbers signs are drawn. Source: Fisher, The Design of Experiments (1935), section 21. Raises ValueError for no
    task.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} tasks are no pairs")
    differences = [b - a for a, b in zip(first, second)]
    rows = np.asarray([float(each) for each in differences], np.float64)
    centre, half = float(rows.mean()), _Z * _standard_error(rows)
    better, worse = int((rows > 0).sum()), int((rows < 0).sum())
    chance = _p_value(differences, rows)
    return Difference(centre, centre - half, centre + half, chance, better, worse, len(rows) - better - worse)


def _standard_error(rows: NDArray[np.float64]) -> float:
    return float(rows.std(ddof=1)) / sqrt(len(rows)) if len(rows) > 1 else 0.0


def _p_value(differences: Sequence[Fraction | float], rows: NDArray[np.float64]) -> float:
    exact = [Fraction(each) for each in differences if isinstance(each, int | Fraction) and each]
    if len(exact) == sum(1 for each in differences if each):
        scale = lcm(*(each.denominator for each in exact))
        steps = [abs(int(each * scale)) for each in exact]
        if len(steps) * (2 * sum(steps) + 1) <= _MOST_VALUES * 1000 and 2 * sum(steps) + 1 <= _MOST_VALUES:
            return _exact(steps, abs(int(sum(exact, Fraction(0)) * scale)))
    # A sum that equals the one measured may differ from it by rounding.
    found = abs(float(rows.sum())) * (1 - 1e-12)
    draws = np.random.default_rng(0)
    extreme = sum(
        int((np.abs(draws.choice([-1.0, 1.0], (100, len(rows))) @ rows) >= found).sum()) for _ in range(_DRAWS // 100)
    )
    return (extreme + 1) / (_DRAWS + 1)


def _exact(steps: Sequence[int], found: int) -> float:
    """Return the probability that a sum of `steps`, each with a random sign, is at least `found` from 0."""
    total = sum(steps)
    # Probability of each sum, from -total to total.
    chance = np.zeros(2 * total + 1)
    chance[total] = 1.0
    reach = 0
    for step in steps:
        part = chance[total - reach : total + reach + 1].copy()
        chance[total - reach : total + reach + 1] = 0.0
        chance[total - reach - step : total + reach - step + 1] += part / 2
        chance[total - reach + step : total + reach + step + 1] += part / 2
        reach += step
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(chance[sums >= found].sum()))
