"""`RankBatch` turns micro-batches into arrays and back without a change."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.preflight.declared_columns import COLUMNS, Column
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.packing import pack
from rlctl.training.trainer_worker import RankBatch


def sequence(length: int, start: int) -> TrainingSample:
    tokens = np.arange(start, start + length, dtype=np.int32)
    return TrainingSample(tokens, tokens % 2 == 0, {"advantage": tokens.astype(np.float32) / 7})


def tokens_of(batches: list[list[TrainingSample]]) -> list[list[list[int]]]:
    return [[sample.tokens.tolist() for sample in batch] for batch in batches]


def test_micro_batches_come_back_as_they_went() -> None:
    sent = [[sequence(3, 0), replace(sequence(5, 10), rollout=7)], [], [replace(sequence(1, 20), rollout=0)]]
    back = RankBatch.from_micro_batches(sent).micro_batches()
    assert [len(batch) for batch in back] == [2, 0, 1]
    for sample, sent_sample in zip(chain.from_iterable(back), chain.from_iterable(sent)):
        assert np.array_equal(sample.tokens, sent_sample.tokens)
        assert np.array_equal(sample.mask, sent_sample.mask)
        assert np.array_equal(sample.columns["advantage"], sent_sample.columns["advantage"])
        assert sample.rollout == sent_sample.rollout


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5))
def test_any_packing_survives(lengths: list[list[int]]) -> None:
    sent = [[sequence(length, 10 * length) for length in batch] for batch in lengths]
    share = RankBatch.from_micro_batches(sent)
    assert (share.tokens.dtype, share.mask.dtype, share.lengths.dtype) == (np.int32, np.bool_, np.int32)
    assert all(column.dtype == np.float32 for column in share.columns.values())
    assert len(share.tokens) == len(share.mask) == sum(map(sum, lengths))
    assert tokens_of(share.micro_batches()) == tokens_of(sent)


def test_sequences_that_come_back_are_views_of_the_columns() -> None:
    share = RankBatch.from_micro_batches([[sequence(3, 0), sequence(2, 5)]])
    for sample in share.micro_batches()[0]:
        assert np.shares_memory(sample.tokens, share.tokens)
        assert np.shares_memory(sample.columns["advantage"], share.columns["advantage"])


def test_a_rank_without_sequences_has_empty_columns() -> None:
    assert RankBatch.from_micro_batches([[], []]).micro_batches() == [[], []]


def test_a_column_travels_and_is_packed_with_its_own_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "routes", Column("routes", "int16", (2,)))
    rows = [np.arange(2 * length, dtype=np.int16).reshape(length, 2) for length in (3, 2)]
    sent = [replace(sequence(len(row), 0), columns={"routes": row}) for row in rows]
    [back] = RankBatch.from_micro_batches([sent]).micro_batches()
    assert [sample.columns["routes"].tolist() for sample in back] == [row.tolist() for row in rows]
    packed = pack(back, torch.device("cpu")).columns["routes"]
    assert packed.dtype == torch.int16 and packed.tolist() == [*rows[0].tolist(), *rows[1].tolist()]
