"""A batch on its way to the ranks."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rlctl.preflight.load import load
from rlctl.training.interface import Totals, TrainingSample
from rlctl.training.trainer_group import TrainerGroup


def sequence(length: int) -> TrainingSample:
    return TrainingSample(np.arange(length, dtype=np.int32), np.ones(length, np.bool_))


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "pipeline": 3}, {"context": 2}])
def test_tokens_count_once_however_many_ranks_get_them(layout: dict[str, int]) -> None:
    names = {"tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context"}
    sizes = [f"trainer.megatron.{names[name]}_parallel_size={size}" for name, size in layout.items()]
    backend = ["trainer.backend=megatron"] if layout else []
    section = load("sft", None, [*backend, "trainer.num_ranks=6", *sizes]).config.trainer
    ready = TrainerGroup(cast(Any, None), section).prepare([sequence(n) for n in (9, 30, 4, 17)])
    assert sorted(ready.lengths) == [4, 9, 17, 30]
    assert len(ready.shares) == 6
    copies = int(np.prod([*layout.values()], dtype=int))
    assert sum(len(share.tokens) for share in ready.shares) == copies * sum(ready.lengths)


class Recorder:
    """A group of two ranks that only takes note."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[Any, ...]]]] = []

    def run(self, method: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        self.calls.append((method.__name__, arguments))
        return [{}] * len(arguments)


def test_parts_are_divided_by_all_that_there_was_so_far_and_an_empty_last_one_still_updates() -> None:
    section, group = load("grpo", None, ["trainer.num_ranks=2"]).config.trainer, Recorder()
    client = TrainerGroup(cast(Any, group), section)
    loss = cast(Any, "loss")
    first = client.accumulate([sequence(5), sequence(3)], loss, None)
    second = client.accumulate([sequence(4)], loss, first)
    client.train([], loss, second)
    assert (first, second) == (Totals(8, 2), Totals(12, 3))
    assert [method for method, _ in group.calls] == ["accumulate", "accumulate", "train"]
    assert [each[0][1:] for _, each in group.calls] == [
        ("loss", first, None),
        ("loss", second, first),
        ("loss", second, second),
    ]
    assert all(share.micro_batches() == [[]] for share, *_ in group.calls[-1][1])
    # The ranks refuse an update of nothing.
    client.train([], loss)
    assert all(share.micro_batches() == [] for share, *_ in group.calls[-1][1])
