"""Received items are copied to their regions of parameters, and twins replace all live parameters at once."""

import pytest
import torch
from torch import Tensor

from rlctl.refit.param_slices import ParamSlice, ParamSliceSink, ShadowParams, verify_complete
from rlctl.refit.protocol import RefitError
from rlctl.refit.refit_plan import RefitPlan, TensorSlice

Q = torch.arange(24.0).view(6, 4)
K = torch.arange(100.0, 108.0).view(2, 4)
LAYOUT = [("q", (6, 4), "float32"), ("k", (2, 4), "float32")]


def make_fused_parameter() -> tuple[Tensor, list[ParamSlice]]:
    """Return a parameter with q and k stacked, as fused projections are, and its regions."""
    parameter = torch.zeros(8, 4)
    regions = [
        ParamSlice(TensorSlice("q", (0, 0), (6, 4)), parameter[:6]),
        ParamSlice(TensorSlice("k", (0, 0), (2, 4)), parameter[6:]),
    ]
    return parameter, regions


def fill(sink: ParamSliceSink, plan: RefitPlan) -> None:
    tensors = {"q": Q, "k": K}
    arrived = [(number, tensors[item.box.name][item.box.slices()]) for number, item in enumerate(plan.items)]
    sink.copies(arrived).run()


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 48, 32, 16])
def test_items_of_any_cut_land_in_place(buffer_bytes: int) -> None:
    parameter, regions = make_fused_parameter()
    plan = RefitPlan.build(LAYOUT, buffer_bytes=buffer_bytes)
    sink = ParamSliceSink(plan, regions)
    targets = [sink.target(number) for number in range(len(plan.items))]
    assert all(target is not None and target.shape == item.box.shape for target, item in zip(targets, plan.items))
    fill(sink, plan)
    assert torch.equal(parameter, torch.cat([Q, K]))


def test_a_tensor_parallel_rank_keeps_its_part_and_has_no_target_for_more() -> None:
    parameter = torch.zeros(6, 2)
    plan = RefitPlan.build(LAYOUT)
    sink = ParamSliceSink(plan, [ParamSlice(TensorSlice("q", (0, 2), (6, 2)), parameter)])
    assert [sink.target(number) for number in range(len(plan.items))] == [None, None]
    fill(sink, plan)
    assert torch.equal(parameter, Q[:, 2:])


def test_an_item_over_two_parameters_reaches_both_and_another_dtype_is_converted() -> None:
    upper = torch.zeros(3, 4)
    lower = torch.zeros(3, 4, dtype=torch.bfloat16)
    regions = [ParamSlice(TensorSlice("q", (0, 0), (3, 4)), upper), ParamSlice(TensorSlice("q", (3, 0), (3, 4)), lower)]
    plan = RefitPlan.build(LAYOUT)
    sink = ParamSliceSink(plan, regions)
    assert sink.target(0) is None
    fill(sink, plan)
    assert torch.equal(upper, Q[:3])
    assert torch.equal(lower, Q[3:].bfloat16())


def test_twins_change_nothing_live_until_the_commit_and_padding_survives_it() -> None:
    live = torch.full((10, 4), -1.0)
    regions = [
        ParamSlice(TensorSlice("q", (0, 0), (6, 4)), live[:6]),
        ParamSlice(TensorSlice("k", (0, 0), (2, 4)), live[6:8]),
    ]
    shadow = ShadowParams({"w": live}, regions)
    assert shadow.nbytes == live.numel() * 4
    plan = RefitPlan.build(LAYOUT)
    fill(ParamSliceSink(plan, shadow.regions), plan)
    assert (live == -1).all()
    shadow.commit()
    assert torch.equal(live[:8], torch.cat([Q, K]))
    assert (live[8:] == -1).all()


def test_a_parameter_that_would_keep_old_numbers_is_named() -> None:
    parameter, regions = make_fused_parameter()
    verify_complete(regions, {"qk": parameter}, set())
    with pytest.raises(RefitError, match=r"the engine's qk has 32 numbers, the trainer's tensors fill 24"):
        verify_complete(regions[:1], {"qk": parameter}, set())
    verify_complete(regions[:1], {"qk": parameter}, {"qk"})
    with pytest.raises(RefitError, match=r"the engine's other has 3 numbers, the trainer's tensors fill 0"):
        verify_complete(regions, {"qk": parameter, "other": torch.zeros(3)}, {"other"})
