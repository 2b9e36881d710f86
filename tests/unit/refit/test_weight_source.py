"""Source and ring: a rank's items are views of the rank's memory; other items are packed in a buffer."""

import pytest
import torch

from rlctl.refit.protocol import RefitError
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.staging import StagingBuffers
from rlctl.refit.weight_sink import BatchedCopy
from rlctl.refit.weight_source import Shard, WeightSource
from tests.unit.refit.weights import CPU, make_weights, plan_for, shards_of, source_of


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_item_of_every_rank_is_a_view_of_the_weights(world: int) -> None:
    weights = make_weights()
    plan = plan_for(weights, world, buffer_bytes=300_000)
    for rank in range(world):
        source = source_of(plan, weights, rank, world)
        for _, chunk in plan.chunks_of(rank):
            for number in chunk.numbers:
                box = plan.items[number].box
                tensor = weights[box.name]
                view = source.view(number)
                assert torch.equal(view, tensor[box.slices()])
                assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_only_contiguous_memory_of_the_right_dtype_is_sent_as_it_lies() -> None:
    weights = {"right": torch.randn(4, 4), "across": torch.randn(4, 4).T, "wide": torch.randn(4, dtype=torch.float64)}
    plan = RefitPlan.build([(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()])
    source = source_of(plan, weights)
    assert [source.is_ready(n) for n in range(3)] == [True, False, False]


def test_weights_that_moved_are_found_out() -> None:
    weights = make_weights()
    source = source_of(plan_for(weights), weights)
    source.verify_in_place(shards_of(weights, 0, 1))
    weights["odd"] = weights["odd"].clone()
    with pytest.raises(RefitError, match="odd moved to other memory after the refit was opened"):
        source.verify_in_place(shards_of(weights, 0, 1))


def test_an_item_that_a_rank_does_not_hold_is_named() -> None:
    plan = RefitPlan.build([("w", (4, 2), "float32")])
    with pytest.raises(RefitError, match=r"w: this rank does not hold \(4, 2\) from \(0, 0\)"):
        WeightSource(plan, 0, [Shard("w", (0, 0), torch.zeros(3, 2))])


def test_a_packed_segment_is_one_run_of_bytes_converted_on_the_way() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(2, 2).T, "c": torch.randn(7)}
    plan = RefitPlan.build([(name, tuple(tensor.shape), "bfloat16") for name, tensor in weights.items()])
    (chunk,) = plan.chunks
    (segment,) = chunk.segments
    slots = StagingBuffers(plan, plan.chunks, 2, CPU, in_place=())
    source = source_of(plan, weights)
    BatchedCopy((slots.view(n, 1), source.view(n)) for n in chunk.numbers).run()  # type: ignore[misc]
    assert slots.segment_bytes(segment, 1).numel() == segment.nbytes
    for number, tensor in enumerate(weights.values()):
        packed = slots.view(number, 1)
        assert packed is not None and torch.equal(packed, tensor.bfloat16())


def test_buffers_are_as_large_as_the_fullest_chunk_needs_and_none_if_all_lies_right() -> None:
    weights = {"a": torch.randn(1024, 512), "b": torch.randn(256, 512)}
    plan = plan_for(weights, buffer_bytes=1 << 20)
    everything = set(range(len(plan.items)))
    assert StagingBuffers(plan, plan.chunks, 3, CPU, everything).nbytes == 0
    assert StagingBuffers(plan, plan.chunks, 3, CPU, everything - {2}).nbytes == 3 * plan.items[2].nbytes
    assert StagingBuffers(plan, plan.chunks, 2, CPU, ()).nbytes == 2 * max(chunk.nbytes for chunk in plan.chunks)
