"""The plan: aligned places in sending order, and a digest that two sides which disagree cannot share."""

import pytest

from rlctl.refit.plan import ALIGNMENT, Header, Plan, RefitError, check_entry

LAYOUT = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c", (1000,), "float32")]


def test_entries_keep_their_order_and_are_aligned() -> None:
    plan = Plan.build(LAYOUT)
    assert [entry.name for entry in plan.entries] == ["a", "b", "c"]
    assert [entry.nbytes for entry in plan.entries] == [60, 2, 4000]
    assert [entry.offset for entry in plan.entries] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert plan.nbytes == 2 * ALIGNMENT + 8 * ALIGNMENT


@pytest.mark.parametrize(
    "other",
    [
        [LAYOUT[1], LAYOUT[0], LAYOUT[2]],
        [("x", (3, 5), "float32"), *LAYOUT[1:]],
        [("a", (5, 3), "float32"), *LAYOUT[1:]],
        [("a", (3, 5), "bfloat16"), *LAYOUT[1:]],
        LAYOUT[:2],
    ],
)
def test_any_difference_is_another_digest(other: list[tuple[str, tuple[int, ...], str]]) -> None:
    assert Plan.build(other).digest != Plan.build(LAYOUT).digest


def test_a_header_of_another_plan_is_refused() -> None:
    plan = Plan.build(LAYOUT)
    plan.verify(Header(1, plan.digest, False))
    with pytest.raises(RefitError, match=f"this end was given plan {plan.digest}"):
        plan.verify(Header(1, Plan.build(LAYOUT[:1]).digest, False))


def test_an_export_that_departs_from_the_plan_is_named() -> None:
    entry = Plan.build(LAYOUT).entries[0]
    check_entry(entry, "a", (3, 5), "float32")
    with pytest.raises(RefitError, match=r"the plan has a \(3, 5\) float32, the trainer exported a \(3, 5\) bfloat16"):
        check_entry(entry, "a", (3, 5), "bfloat16")
