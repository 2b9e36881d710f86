from dataclasses import replace

import numpy as np
import pytest
import torch

from rlctl.training.micro_batching import TrainingSample
from rlctl.training.packing import pack

CPU = torch.device("cpu")


def sequence(*tokens: int, **fields: list[float]) -> TrainingSample:
    values = {name: np.array(value, np.float32) for name, value in fields.items()}
    return TrainingSample(np.array(tokens, np.int32), np.ones(len(tokens), bool), values)


def test_sequences_lie_end_to_end_and_positions_start_again() -> None:
    packed = pack([sequence(5, 6, 7, advantage=[1, 2, 3]), sequence(8, 9, advantage=[4, 5])], CPU)
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1]
    assert packed.sequence.tolist() == [0, 0, 0, 1, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5] and packed.cu_seqlens.dtype == torch.int32
    assert packed.columns["advantage"].tolist() == [1, 2, 3, 4, 5]
    assert packed.max_len == 3 and packed.lengths == (3, 2)


def test_rows_of_a_rollout_have_one_index() -> None:
    rows = [replace(sequence(5, 6), rollout=rollout) for rollout in (9, None, 9, None)]
    packed = pack(rows, CPU)
    assert packed.rollout.tolist() == [0, 0, 1, 1, 0, 0, 2, 2] and packed.num_rollouts == 3
    separate_rows = pack([sequence(5, 6), sequence(7)], CPU)
    assert separate_rows.rollout is separate_rows.sequence and separate_rows.num_rollouts == 2


def test_a_first_token_is_masked_whatever_its_sequence_says() -> None:
    assert pack([sequence(5, 6), sequence(7)], CPU).mask.tolist() == [False, True, False]


def test_an_empty_micro_batch_is_two_masked_tokens() -> None:
    packed = pack([], CPU)
    assert packed.lengths == (2,) and packed.mask.tolist() == [False, False]


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 of the micro-batch has no tokens"):
        pack([sequence(5, 6), sequence()], CPU)


def test_sequences_with_different_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in their columns"):
        pack([sequence(5, advantage=[1]), sequence(6)], CPU)
