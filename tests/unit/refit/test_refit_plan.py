"""The plan: every number of every tensor travels once, in chunks that fit a buffer, by a digest both ends share."""

import pickle
from itertools import chain, pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.refit.protocol import Header, RefitError
from rlctl.refit.refit_plan import ALIGNMENT, ITEM_BYTES, PACKED_BYTES, SAMPLE, RefitPlan, TensorSlice
from tests.unit.refit.weights import make_weights, plan_for

Row = tuple[str, tuple[int, ...], str]
LAYOUT: list[Row] = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c", (1000,), "float32")]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([*ITEM_BYTES])
layouts = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(shapes, dtypes), min_size=1).map(
    lambda tensors: [(name, shape, dtype) for name, (shape, dtype) in tensors.items()]
)


def row_boxes(rows: list[Row], world: int) -> list[list[TensorSlice]]:
    """Return the boxes of each rank: every tensor in runs of rows. All ranks hold the scalars."""
    boxes: list[list[TensorSlice]] = [[] for _ in range(world)]
    for name, shape, _ in rows:
        for rank in range(world):
            if not shape:
                boxes[rank].append(TensorSlice(name, (), ()))
                continue
            size = -(-shape[0] // world)
            begin = min(rank * size, shape[0])
            end = min((rank + 1) * size, shape[0])
            if end > begin:
                start = (begin, *[0] * (len(shape) - 1))
                boxes[rank].append(TensorSlice(name, start, (end - begin, *shape[1:])))
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
    plan = RefitPlan.build(rows, row_boxes(rows, world), buffer_bytes=max(limit, widest), edge_bytes=edge)
    covered = [0] * len(rows)
    for item in plan.items:
        covered[item.entry] += prod(item.box.shape)
        assert item.nbytes == prod(item.box.shape) * ITEM_BYTES[plan.entries[item.entry].dtype] > 0
    assert covered == [prod(shape) for _, shape, _ in rows]
    numbers = list[int]()
    for chunk in plan.chunks:
        numbers += chunk.numbers
        assert 0 < chunk.nbytes <= max(limit, widest) + ALIGNMENT
        items = [plan.items[number] for number in chunk.numbers]
        assert all(item.offset % ALIGNMENT == 0 for item in items)
        assert all(item.offset + item.nbytes <= next_item.offset for item, next_item in pairwise(items))
    assert numbers == list(range(len(plan.items)))


@given(layouts, st.integers(1, 4))
def test_segments_are_one_large_item_or_a_run_of_small_ones(rows: list[Row], world: int) -> None:
    plan = RefitPlan.build(rows, row_boxes(rows, world))
    for chunk in plan.chunks:
        for segment in chunk.segments:
            items = plan.items[segment.first : segment.last]
            assert segment.offset == items[0].offset
            assert segment.offset + segment.nbytes == items[-1].offset + items[-1].nbytes
            if not segment.is_single:
                assert all(item.nbytes < PACKED_BYTES for item in items)


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
    plan = RefitPlan.build(rows, row_boxes(rows, world)[::-1], buffer_bytes=1 << 20, edge_bytes=2_000)
    if not plan.chunks:
        return
    chunks = plan.chunks_for(receiver)
    assert sorted(number for number, _ in chunks) == list(range(len(plan.chunks)))
    for owner in plan.owners:
        owners_chunks = [(number, chunk) for number, chunk in chunks if chunk.owner == owner]
        assert owners_chunks == list(plan.chunks_of(owner))
    _, first_chunk = chunks[0]
    assert first_chunk.owner == plan.owners[(receiver - 1) % len(plan.owners)]


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
def test_two_layouts_share_a_digest_only_if_they_are_the_same(rows: list[Row], other_rows: list[Row]) -> None:
    assert (RefitPlan.build(rows).digest == RefitPlan.build(other_rows).digest) == (rows == other_rows)
    assert RefitPlan.build(rows).digest == RefitPlan.build(list(rows)).digest


def test_another_owner_or_boundary_is_another_digest() -> None:
    weights = make_weights()
    sizes = product((1, 2, 3), (300_000, 1 << 20))
    digests = {plan_for(weights, world, buffer_bytes).digest for world, buffer_bytes in sizes}
    assert len(digests) == 6


def test_a_plan_that_travelled_is_the_same() -> None:
    plan = plan_for(make_weights(), 2, 300_000)
    arrived = pickle.loads(pickle.dumps(plan))
    assert arrived == plan and arrived.digest == plan.digest and arrived.chunks[0].numbers == plan.chunks[0].numbers


def test_a_header_of_another_plan_is_refused() -> None:
    plan = RefitPlan.build(LAYOUT)
    plan.verify(Header(1, plan.digest, "all"))
    with pytest.raises(RefitError, match=f"this end was given plan {plan.digest}"):
        plan.verify(Header(1, RefitPlan.build(LAYOUT[:1]).digest, "all"))


def test_sampled_checks_reach_every_item_within_a_sample_of_versions() -> None:
    plan = plan_for(make_weights(), buffer_bytes=4096 * 4)
    samples = [plan.checked_items(Header(version, plan.digest, "sampled")) for version in range(SAMPLE)]
    assert sorted(chain.from_iterable(samples)) == list(range(len(plan.items)))
    assert plan.checked_items(Header(5, plan.digest, "all")) == frozenset(range(len(plan.items)))
    assert plan.checked_items(Header(5, plan.digest, "off")) == frozenset()


def test_every_rank_of_an_uneven_split_sends_its_own() -> None:
    weights = make_weights()
    plan = plan_for(weights, 3)
    assert sum(item.nbytes for item in plan.items) == plan.payload
    assert weights.keys() - {item.box.name for item in plan.items} == {"none"}


def test_the_number_of_groups_does_not_grow_with_the_owners() -> None:
    rows = 512
    for owners in (1, 2, 3, 64, 512):
        share = -(-rows // owners)
        boxes = [[TensorSlice("a", (begin, 0), (min(share, rows - begin), 2))] for begin in range(0, rows, share)]
        plan = RefitPlan.build([("a", (rows, 2), "float32")], boxes)
        assert len(plan.owner_groups) == min(owners, 2)
        assert sorted(chain.from_iterable(plan.owner_groups)) == list(plan.owners)
        # Neighbours in sending order are of different groups, so that one is loaded while the next one arrives.
        for chunk, next_chunk in pairwise(plan.chunks):
            assert owners == 1 or group_of(plan, chunk.owner) != group_of(plan, next_chunk.owner)


def group_of(plan: RefitPlan, owner: int) -> int:
    return next(number for number, group in enumerate(plan.owner_groups) if owner in group)
