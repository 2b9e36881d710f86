"""The driver's refit makes one plan for all ranks, which must have one model."""

from typing import Any

import pytest

from rlctl.refit.protocol import RefitError
from rlctl.refit.refit import Refit, RefitOptions, ask_holdings
from rlctl.refit.refit_plan import TensorSlice, layout_digest
from rlctl.refit.sender import Holding, SendsWeights

LAYOUT = [("a", (4, 2), "float32"), ("b", (2,), "float32")]
OPTIONS = RefitOptions(
    kind="broadcast",
    dtype="float32",
    mode="auto",
    num_buffers=2,
    buffer_memory_ratio=0.02,
    timeout_s=1.0,
    folder="",
    checks="all",
    colocated=False,
    in_flight=False,
)


class Answered:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def wait(self, deadline_s: float) -> list[Any]:
        return [self.answer]


class Ranks:
    """Trainer ranks that answer at once. `start` calls rank 0."""

    deadline_s = 1.0

    def __init__(self, holdings: list[Holding]) -> None:
        self.holdings = holdings
        self.workers = [self]

    def __len__(self) -> int:
        return len(self.holdings)

    def run(self, method: Any, per_rank: list[Any]) -> list[Holding]:
        assert method is SendsWeights.refit_holding
        self.arguments_by_rank = per_rank
        return self.holdings

    def start(self, method: Any, *arguments: Any) -> Answered:
        assert method is SendsWeights.refit_layout
        return Answered(LAYOUT)


def make_holding(digest: str, boxes: list[TensorSlice]) -> Holding:
    return Holding(digest, boxes_digest="", boxes=boxes, device_bytes=1 << 30)


def test_a_rank_of_another_model_is_named() -> None:
    boxes = [TensorSlice("a", (0, 0), (4, 2)), TensorSlice("b", (0,), (2,))]
    other = layout_digest([("a", (4, 2), "float32"), ("b", (2,), "bfloat16")])
    holdings = [make_holding(layout_digest(LAYOUT), boxes), make_holding(other, [])]
    ranks: Any = Ranks(holdings)
    with pytest.raises(RefitError, match="trainer rank 1 has other tensors, shapes or dtypes than trainer rank 0"):
        Refit(ranks, OPTIONS)
    assert ranks.arguments_by_rank == [("float32", True)] * 2


def test_ranks_that_hold_the_same_as_others_send_no_boxes() -> None:
    ranks: Any = Ranks([make_holding(layout_digest(LAYOUT), [])] * 4)
    assert ask_holdings(ranks, "float32", range(2)) == (LAYOUT, ranks.holdings)
    assert ranks.arguments_by_rank == [("float32", True)] * 2 + [("float32", False)] * 2
