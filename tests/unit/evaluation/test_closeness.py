"""Rounding is no difference, and a difference is no rounding."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.evaluation.closeness import EXACT, Closeness, Side, compare

LENGTHS = (40, 2, 200)
RNG = np.random.default_rng(0)
EXACTLY = [np.concatenate([[0.0], RNG.normal(-3, 1, n - 1)]).astype(np.float32) for n in LENGTHS]


def off(nats: float, seed: int) -> list[NDArray[np.float32]]:
    """Log-probs with an error of that deviation."""
    rng = np.random.default_rng(seed)
    return [(row + nats * rng.normal(size=len(row))).astype(np.float32) for row in EXACTLY]


def judged(first: float, second: float, apart: float = 0.0) -> Closeness:
    """Two sides with these deviations from float32, whose float32 passes differ by `apart`."""
    return compare("bfloat16", Side("a", off(first, 1), EXACTLY), Side("b", off(second, 2), off(apart, 3)))


@pytest.mark.parametrize("nats", [1e-3, 0.01, 0.3])
def test_sides_that_round_alike_hold_however_much_they_round(nats: float) -> None:
    found = judged(nats, 1.3 * nats, apart=EXACT / 10)
    assert found.holds and found.gradient > EXACT and 0.5 * nats < found.rounding < nats


@pytest.mark.parametrize(("tokens", "nats", "holds"), [(3, 0.1, True), (60, 0.5, False), (3, 9.0, False)])
def test_a_few_tokens_may_take_other_experts_and_no_more(tokens: int, nats: float, holds: bool) -> None:
    some = off(0.01, 1)
    some[2][1 : 1 + tokens] += np.float32(nats)
    assert compare("bfloat16", Side("a", some, EXACTLY), Side("b", off(0.01, 2), EXACTLY)).holds is holds


@pytest.mark.parametrize(("first", "second"), [(0.01, 0.04), (0.04, 0.01), (np.nan, 0.01), (0.01, 0.0)])
def test_a_side_that_is_farther_from_float32_than_rounding_is_refused(first: float, second: float) -> None:
    assert not judged(first, second).holds


@pytest.mark.parametrize(("apart", "holds"), [(0.0002, True), (0.002, False), (np.nan, False)])
def test_sides_whose_float32_differs_by_more_than_a_share_of_the_rounding_are_refused(
    apart: float, holds: bool
) -> None:
    found = judged(0.03, 0.03, apart)
    assert found.holds is holds and not found.worst <= EXACT and found.gradient > 0.03


def test_in_float32_nothing_is_rounded() -> None:
    for nats, holds in ((EXACT / 10, True), (EXACT, False), (np.nan, False)):
        found = compare("float32", Side("a", EXACTLY, None), Side("b", off(nats, 1), None))
        assert (found.holds, found.gradient, found.rounding) == (holds, EXACT, 0.0)


def test_a_side_without_a_float32_pass_is_measured_by_the_others() -> None:
    for nats, holds in ((0.012, True), (0.04, False)):
        assert compare("bfloat16", Side("a", off(nats, 1), None), Side("b", off(0.01, 2), EXACTLY)).holds is holds


def test_without_any_the_bound_is_the_fields() -> None:
    for nats, holds in ((0.02, True), (0.2, False)):
        found = compare("bfloat16", Side("a", off(nats, 1), None), Side("b", EXACTLY, None))
        assert found.holds is holds and found.gradient == pytest.approx(0.1)
