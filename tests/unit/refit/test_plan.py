"""The plan: aligned places in sending order, and a digest that two sides which disagree cannot share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlctl.refit.plan import ALIGNMENT, ITEM_BYTES, Header, Plan, RefitError, planned

Row = tuple[str, tuple[int, ...], str]
LAYOUT: list[Row] = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c", (1000,), "float32")]
TENSORS = [("a", torch.zeros(3, 5)), ("b", torch.zeros((), dtype=torch.bfloat16)), ("c", torch.zeros(1000))]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
layouts = st.lists(st.tuples(st.text(min_size=1, max_size=4), shapes, st.sampled_from([*ITEM_BYTES])), min_size=1)


def test_entries_keep_their_order_and_are_aligned() -> None:
    plan = Plan.build(LAYOUT)
    assert [entry.name for entry in plan.entries] == ["a", "b", "c"]
    assert [entry.nbytes for entry in plan.entries] == [60, 2, 4000]
    assert [entry.offset for entry in plan.entries] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert plan.nbytes == 2 * ALIGNMENT + 8 * ALIGNMENT


@given(layouts)
def test_places_never_overlap_and_waste_less_than_the_alignment(layout: list[Row]) -> None:
    plan = Plan.build(layout)
    ends = [entry.offset + entry.nbytes for entry in plan.entries]
    for end, start in zip(ends, [*(entry.offset for entry in plan.entries[1:]), plan.nbytes]):
        assert start % ALIGNMENT == 0
        assert 0 <= start - end < ALIGNMENT


@given(layouts, layouts)
def test_two_layouts_share_a_digest_only_if_they_are_the_same(one: list[Row], other: list[Row]) -> None:
    assert (Plan.build(one).digest == Plan.build(other).digest) == (one == other)
    assert Plan.build(one).digest == Plan.build(list(one)).digest


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([LAYOUT[1], LAYOUT[0], LAYOUT[2]], id="order"),
        pytest.param([("x", (3, 5), "float32"), *LAYOUT[1:]], id="name"),
        pytest.param([("a", (5, 3), "float32"), *LAYOUT[1:]], id="shape"),
        pytest.param([("a", (3, 5), "bfloat16"), *LAYOUT[1:]], id="dtype"),
        pytest.param(LAYOUT[:2], id="fewer"),
    ],
)
def test_any_difference_is_another_digest(other: list[Row]) -> None:
    assert Plan.build(other).digest != Plan.build(LAYOUT).digest


def test_a_header_of_another_plan_is_refused() -> None:
    plan = Plan.build(LAYOUT)
    plan.verify(Header(1, plan.digest, False))
    with pytest.raises(RefitError, match=f"this end was given plan {plan.digest}"):
        plan.verify(Header(1, Plan.build(LAYOUT[:1]).digest, False))


def test_an_export_that_follows_the_plan_is_paired_with_its_entries() -> None:
    plan = Plan.build(LAYOUT)
    pairs = list(planned(plan, iter(TENSORS)))
    assert [entry for entry, _ in pairs] == list(plan.entries)
    assert all(tensor is theirs for (_, tensor), (_, theirs) in zip(pairs, TENSORS))


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ([("a", torch.zeros(3, 5).half()), *TENSORS[1:]], r"has a \(3, 5\) float32, .* exported a \(3, 5\) float16"),
        ([("a", torch.zeros(5, 3)), *TENSORS[1:]], r"has a \(3, 5\) float32, .* exported a \(5, 3\) float32"),
        ([("x", torch.zeros(3, 5)), *TENSORS[1:]], r"has a \(3, 5\) float32, .* exported x \(3, 5\) float32"),
        (TENSORS[:2], r"has c \(1000,\) float32, the trainer exported nothing more"),
        ([*TENSORS, TENSORS[0]], r"has nothing more, the trainer exported a \(3, 5\) float32"),
    ],
    ids=["dtype", "shape", "name", "fewer", "more"],
)
def test_an_export_that_departs_from_the_plan_is_named(export: list[tuple[str, Tensor]], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        list(planned(Plan.build(LAYOUT), iter(export)))
