"""Rounding is no difference, and a difference is no rounding."""

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.evaluation.closeness import EXACT, Closeness, Side, judge_sides

LENGTHS = (40, 2, 200)
RNG = np.random.default_rng(0)
EXACT_ROWS = [np.concatenate([[0.0], RNG.normal(-3, 1, length - 1)]).astype(np.float32) for length in LENGTHS]


def noisy(nats: float, seed: int) -> list[NDArray[np.float32]]:
    """Return the exact log-probs plus random errors with a standard deviation of `nats`."""
    rng = np.random.default_rng(seed)
    return [(row + nats * rng.normal(size=len(row))).astype(np.float32) for row in EXACT_ROWS]


def judge(first: float, second: float, exact_gap: float = 0.0) -> Closeness:
    """Compare two sides in bfloat16. first, second: deviation of each side from its float32 pass, in nats.

    exact_gap: deviation between the float32 passes of both sides.
    """
    return judge_sides(
        "bfloat16", Side("a", noisy(first, 1), EXACT_ROWS), Side("b", noisy(second, 2), noisy(exact_gap, 3))
    )


@pytest.mark.parametrize("nats", [1e-3, 0.01, 0.3])
def test_sides_that_round_alike_hold_however_much_they_round(nats: float) -> None:
    closeness = judge(nats, 1.3 * nats, exact_gap=EXACT / 10)
    assert closeness.holds and closeness.gradient > EXACT and 0.5 * nats < closeness.rounding < nats


@pytest.mark.parametrize(("tokens", "nats", "holds"), [(3, 0.1, True), (60, 0.5, False), (3, 9.0, False)])
def test_a_few_tokens_may_take_other_experts_and_no_more(tokens: int, nats: float, holds: bool) -> None:
    rows = noisy(0.01, 1)
    rows[2][1 : 1 + tokens] += np.float32(nats)
    assert judge_sides("bfloat16", Side("a", rows, EXACT_ROWS), Side("b", noisy(0.01, 2), EXACT_ROWS)).holds is holds


def test_a_refusal_by_the_means_shows_the_means() -> None:
    rows = noisy(0.01, 1)
    rows[2][1:4] += np.float32(9.0)
    pair = (Side("a", rows, EXACT_ROWS), Side("b", noisy(0.01, 2), EXACT_ROWS))
    assert re.search(
        r"on average 1\.\de-01, 8\.\de-03 b; allowed: 4 times as much", judge_sides("bfloat16", *pair).text
    )
    assert "on average" not in judge(0.01, 0.04).text + judge(0.01, 0.01).text


@pytest.mark.parametrize(("first", "second"), [(0.01, 0.04), (0.04, 0.01), (np.nan, 0.01), (0.01, np.nan), (0.01, 0.0)])
def test_a_side_that_is_farther_from_float32_than_rounding_is_refused(first: float, second: float) -> None:
    assert not judge(first, second).holds


@pytest.mark.parametrize(("exact_gap", "holds"), [(0.0002, True), (0.002, False), (np.nan, False)])
def test_sides_whose_float32_differs_by_more_than_a_share_of_the_rounding_are_refused(
    exact_gap: float, holds: bool
) -> None:
    closeness = judge(0.03, 0.03, exact_gap)
    assert closeness.holds is holds and not closeness.worst <= EXACT and closeness.gradient > 0.03


def test_in_float32_nothing_is_rounded() -> None:
    for nats, holds in ((EXACT / 10, True), (EXACT, False), (np.nan, False)):
        closeness = judge_sides("float32", Side("a", EXACT_ROWS, None), Side("b", noisy(nats, 1), None))
        assert (closeness.holds, closeness.gradient, closeness.rounding) == (holds, EXACT, 0.0)


def test_a_side_without_a_float32_pass_is_measured_by_the_others() -> None:
    for nats, holds in ((0.012, True), (0.04, False)):
        closeness = judge_sides("bfloat16", Side("a", noisy(nats, 1), None), Side("b", noisy(0.01, 2), EXACT_ROWS))
        assert closeness.holds is holds


def test_without_any_the_bound_is_the_fields() -> None:
    for nats, holds in ((0.02, True), (0.2, False)):
        closeness = judge_sides("bfloat16", Side("a", noisy(nats, 1), None), Side("b", EXACT_ROWS, None))
        assert closeness.holds is holds and closeness.gradient == pytest.approx(0.1)
