"""A batch on its way to the ranks."""

from typing import Any, cast

import numpy as np
import pytest

from rlctl.config.load import load
from rlctl.training.client import TrainerClient
from rlctl.training.interface import Sequence


def sequence(length: int) -> Sequence:
    return Sequence(np.arange(length, dtype=np.int32), np.ones(length, np.bool_))


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "pipeline": 3}, {"context": 2}])
def test_tokens_count_once_however_many_ranks_get_them(layout: dict[str, int]) -> None:
    names = {"tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context"}
    sizes = [f"trainer.megatron.{names[name]}_parallel_size={size}" for name, size in layout.items()]
    backend = ["trainer.backend=megatron"] if layout else []
    section = load("sft", None, [*backend, "trainer.num_ranks=6", *sizes]).config.trainer
    ready = TrainerClient(cast(Any, None), section).prepare([sequence(n) for n in (9, 30, 4, 17)])
    assert ready.tokens == 9 + 30 + 4 + 17
    assert len(ready.shares) == 6
    copies = int(np.prod([*layout.values()], dtype=int))
    assert sum(len(share.tokens) for share in ready.shares) == copies * ready.tokens
