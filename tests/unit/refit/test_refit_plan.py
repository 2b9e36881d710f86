"""The plan: every number of every tensor travels once, in chunks that fit a buffer, by a digest both ends share."""

import pickle
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.refit.protocol import Header, RefitError
from rlctl.refit.refit_plan import ALIGNMENT, ITEM_BYTES, PACKED_BYTES, SAMPLE, RefitPlan, TensorSlice
from tests.unit.refit.weights import layout, plan_for, tensors

Row = tuple[str, tuple[int, ...], str]
LAYOUT: list[Row] = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c", (1000,), "float32")]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([*ITEM_BYTES])
layouts = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(shapes, dtypes), min_size=1).map(
    lambda found: [(name, shape, dtype) for name, (shape, dtype) in found.items()]
)


def row_boxes(rows: list[Row], world: int) -> list[list[TensorSlice]]:
    """Every tensor in runs of rows; scalars are held by all ranks."""
    boxes: list[list[TensorSlice]] = [[] for _ in range(world)]
    for name, shape, _ in rows:
        for rank in range(world):
            if not shape:
                boxes[rank].append(TensorSlice(name, (), ()))
                continue
            size = -(-shape[0] // world)
            begin, end = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
            if end > begin:
                boxes[rank].append(TensorSlice(name, (begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:])))
    return boxes


def test_entries_keep_their_order_and_are_aligned() -> None:
    plan = RefitPlan.build(LAYOUT)
    assert [entry.name for entry in plan.entries] == ["a", "b", "c"]
    assert [entry.nbytes for entry in plan.entries] == [60, 2, 4000]
    assert [entry.offset for entry in plan.entries] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert plan.nbytes == 2 * ALIGNMENT + 8 * ALIGNMENT
    assert plan.payload == 4062


@given(layouts, st.integers(1, 4), st.integers(2_000, 50_000), st.integers(500, 60_000))
def test_every_number_travels_exactly_once_in_chunks_that_fit_a_buffer(
    rows: list[Row], world: int, limit: int, edge: int
) -> None:
    widest = max((prod(shape[1:]) * ITEM_BYTES[dtype] for _, shape, dtype in rows), default=0)
    plan = RefitPlan.build(rows, row_boxes(rows, world), max(limit, widest), edge)
    covered = [0] * len(rows)
    for item in plan.items:
        covered[item.entry] += prod(item.box.shape)
        assert item.nbytes == prod(item.box.shape) * ITEM_BYTES[plan.entries[item.entry].dtype] > 0
    assert covered == [prod(shape) for _, shape, _ in rows]
    assert [n for chunk in plan.chunks for n in chunk.numbers] == list(range(len(plan.items)))
    for chunk in plan.chunks:
        assert 0 < chunk.nbytes <= max(limit, widest) + ALIGNMENT
        places = [(plan.items[n].offset, plan.items[n].nbytes) for n in chunk.numbers]
        assert all(offset % ALIGNMENT == 0 for offset, _ in places)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(places))


@given(layouts, st.integers(1, 4))
def test_segments_are_one_large_item_or_a_run_of_small_ones(rows: list[Row], world: int) -> None:
    plan = RefitPlan.build(rows, row_boxes(rows, world))
    for chunk in plan.chunks:
        for segment in chunk.segments:
            first, last = plan.items[segment.first], plan.items[segment.last - 1]
            assert (segment.offset, segment.nbytes) == (first.offset, last.offset + last.nbytes - first.offset)
            if not segment.is_single:
                assert all(plan.items[n].nbytes < PACKED_BYTES for n in range(segment.first, segment.last))


def test_large_tensors_travel_alone_and_small_ones_between_them_together() -> None:
    rows = [
        ("big", (PACKED_BYTES // 4,), "float32"),
        ("s1", (4,), "float32"),
        ("s2", (4,), "float32"),
        ("big2", (PACKED_BYTES // 4,), "float32"),
    ]
    (chunk,) = RefitPlan.build(rows).chunks
    assert [(segment.first, segment.last) for segment in chunk.segments] == [(0, 1), (1, 3), (3, 4)]


def test_owners_take_turns_and_what_all_hold_goes_to_the_least_loaded() -> None:
    rows = [("m", (8, 1024), "float32"), ("shared", (100,), "float32")]
    boxes = [
        [TensorSlice("m", (0, 0), (6, 1024)), TensorSlice("shared", (0,), (100,))],
        [TensorSlice("m", (6, 0), (2, 1024)), TensorSlice("shared", (0,), (100,))],
    ]
    plan = RefitPlan.build(rows, boxes, buffer_bytes=8192)
    assert [chunk.owner for chunk in plan.chunks] == [0, 1, 0, 1, 0]
    assert [plan.names(chunk) for chunk in plan.chunks] == ["m", "m", "m", "shared", "m"]
    assert plan.owners == (0, 1)
    assert [[number for number, _ in plan.chunks_for(receiver)] for receiver in (1, 2, 3)] == [
        [0, 1, 2, 3, 4],
        [1, 0, 3, 2, 4],
        [0, 1, 2, 3, 4],
    ]


@given(layouts, st.integers(1, 4), st.integers(1, 5))
def test_every_receiver_takes_every_chunk_and_each_owners_in_order(rows: list[Row], world: int, receiver: int) -> None:
    plan = RefitPlan.build(rows, row_boxes(rows, world)[::-1], 1 << 20, 2_000)
    if not plan.chunks:
        return
    taken = plan.chunks_for(receiver)
    assert sorted(number for number, _ in taken) == list(range(len(plan.chunks)))
    for owner in plan.owners:
        assert [part for part in taken if part[1].owner == owner] == list(plan.chunks_of(owner))
    assert taken[0][1].owner == plan.owners[(receiver - 1) % len(plan.owners)]


def test_chunks_are_small_at_both_ends_and_grow_towards_the_middle() -> None:
    rows = [(name, (256, 16), "float32") for name in "abcd"]
    sizes = [chunk.nbytes for chunk in RefitPlan.build(rows, buffer_bytes=16384, edge_bytes=2048).chunks]
    assert sizes[:4] == [2048, 2048, 4096, 8192]
    assert sizes[-1] <= 2048
    assert max(sizes) == 16384
    assert sum(sizes) == 65536


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[TensorSlice("m", (0, 0), (3, 4))]], r"m: the trainer ranks hold 12 of its 32 numbers"),
        ([[TensorSlice("m", (6, 0), (4, 4))]], r"m: a trainer rank holds \(4, 4\) from \(6, 0\), outside \(8, 4\)"),
        ([[TensorSlice("x", (0, 0), (8, 4))]], r"trainer rank 0 holds x, which its layout does not list"),
        (
            [[TensorSlice("m", (0, 0), (8, 4))], [TensorSlice("m", (0, 0), (4, 4))]],
            r"m: the trainer ranks hold 48 of its 32",
        ),
    ],
    ids=["gap", "outside", "unknown", "overlap"],
)
def test_boxes_that_do_not_make_up_the_tensors_are_named(boxes: list[list[TensorSlice]], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        RefitPlan.build([("m", (8, 4), "float32")], boxes)


def test_a_row_that_fits_no_buffer_names_the_knob() -> None:
    with pytest.raises(RefitError, match=r"m: one row has 4096 bytes, a buffer 4000: raise refit.buffer_memory_ratio"):
        RefitPlan.build([("m", (2, 1024), "float32")], buffer_bytes=4000)


@given(layouts, layouts)
def test_two_layouts_share_a_digest_only_if_they_are_the_same(one: list[Row], other: list[Row]) -> None:
    assert (RefitPlan.build(one).digest == RefitPlan.build(other).digest) == (one == other)
    assert RefitPlan.build(one).digest == RefitPlan.build(list(one)).digest


def test_another_owner_or_boundary_is_another_digest() -> None:
    held = tensors()
    digests = {plan_for(held, world, size).digest for world in (1, 2, 3) for size in (300_000, 1 << 20)}
    assert len(digests) == 6


def test_a_plan_that_travelled_is_the_same() -> None:
    plan = plan_for(tensors(), 2, 300_000)
    arrived = pickle.loads(pickle.dumps(plan))
    assert arrived == plan and arrived.digest == plan.digest and arrived.chunks[0].numbers == plan.chunks[0].numbers


def test_a_header_of_another_plan_is_refused() -> None:
    plan = RefitPlan.build(LAYOUT)
    plan.verify(Header(1, plan.digest, "all"))
    with pytest.raises(RefitError, match=f"this end was given plan {plan.digest}"):
        plan.verify(Header(1, RefitPlan.build(LAYOUT[:1]).digest, "all"))


def test_sampled_checks_reach_every_item_within_a_sample_of_versions() -> None:
    plan = plan_for(tensors(), buffer_bytes=4096 * 4)
    parts = [plan.checked_items(Header(version, plan.digest, "sampled")) for version in range(SAMPLE)]
    assert sorted(n for part in parts for n in part) == list(range(len(plan.items)))
    assert plan.checked_items(Header(5, plan.digest, "all")) == frozenset(range(len(plan.items)))
    assert plan.checked_items(Header(5, plan.digest, "off")) == frozenset()


def test_every_rank_of_an_uneven_split_sends_its_own() -> None:
    held = tensors()
    plan = plan_for(held, 3)
    assert sum(item.nbytes for item in plan.items) == plan.payload
    assert {name for name, *_ in layout(held)} - {item.box.name for item in plan.items} == {"none"}


def test_the_number_of_groups_does_not_grow_with_the_owners() -> None:
    rows, layout = 512, [("a", (512, 2), "float32")]
    for owners in (1, 2, 3, 64, 512):
        share = -(-rows // owners)
        boxes = [
            [TensorSlice("a", (rank * share, 0), (min(share, rows - rank * share), 2))]
            for rank in range(owners)
            if rank * share < rows
        ]
        plan = RefitPlan.build(layout, boxes)
        assert len(plan.owner_groups) == min(owners, 2)
        assert sorted(owner for group in plan.owner_groups for owner in group) == list(plan.owners)
        # Neighbours in sending order are of different groups, so that one is loaded while the next one arrives.
        order = [next(place for place, group in enumerate(plan.owner_groups) if c.owner in group) for c in plan.chunks]
        assert owners == 1 or all(one != other for one, other in pairwise(order))
