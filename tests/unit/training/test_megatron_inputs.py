"""PackSlicer gives each context-parallel rank its part of a pack."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.training.micro_batching import TrainingSample
from rlctl.training.packing import pack

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def megatron() -> None:
    """Import megatron only when these tests run. An import at the top would cost 0.8 s in each collecting process."""
    pytest.importorskip("megatron.core")


def make_rotary_table(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for a rotary embedding: return two [1, T, dim] filled with the positions and the negated positions."""
    numbers = positions[..., None].to(like.dtype).expand(-1, -1, 4)
    return numbers, -numbers


def sequence(*tokens: int) -> TrainingSample:
    return TrainingSample(np.array(tokens, np.int32), np.ones(len(tokens), bool))


@pytest.mark.parametrize(("lengths", "multiple", "total"), [([3, 2], 4, 8), ([7, 5], 4, 12), ([9], 4, 12), ([5], 1, 5)])
def test_every_rank_gets_an_equal_part_and_the_filler_is_a_sequence(
    lengths: list[int], multiple: int, total: int
) -> None:
    from rlctl.training.megatron.stage_io import PackSlicer

    packed = pack([sequence(*range(1, length + 1)) for length in lengths], CPU)
    ranks = min(2, multiple)
    parts = [PackSlicer(make_rotary_table, torch.float32, multiple, rank, ranks)(packed) for rank in range(ranks)]
    assert [len(part.tokens) for part in parts] == [total // ranks] * ranks
    tokens = torch.cat([part.tokens for part in parts])
    positions = torch.cat([part.positions for part in parts])
    assert tokens[: sum(lengths)].equal(packed.tokens)
    filler = total - sum(lengths)
    bounds = np.cumsum([0, *lengths]).tolist()
    if filler:
        bounds.append(total)
    for part in parts:
        assert part.tokens.equal(tokens[part.first : part.first + len(part.tokens)])
        assert part.pack.cu_seqlens is not None and part.pack.cos is not None
        assert part.pack.cu_seqlens.tolist() == bounds
        assert part.pack.max_len == max(*lengths, filler)
        assert part.pack.cos[:, 0].tolist() == positions.tolist()


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_a_rank_without_work_has_two_tokens_for_each_of_those_that_share_them(multiple: int) -> None:
    from rlctl.training.megatron.stage_io import PackSlicer

    part = PackSlicer(make_rotary_table, torch.float32, multiple, 0, 1)(pack([], CPU))
    assert len(part.tokens) == 2 * multiple
