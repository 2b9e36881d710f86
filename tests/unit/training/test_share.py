"""A rank's micro-batches survive the journey as columns."""

from dataclasses import replace

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


def test_micro_batches_come_back_as_they_went() -> None:
    sent = [[sequence(3, 0), replace(sequence(5, 10), rollout=7)], [], [replace(sequence(1, 20), rollout=0)]]
    back = RankBatch.from_micro_batches(sent).micro_batches()
    assert [len(batch) for batch in back] == [2, 0, 1]
    for ours, theirs in zip((s for b in sent for s in b), (s for b in back for s in b)):
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.mask, theirs.mask)
        assert np.array_equal(ours.columns["advantage"], theirs.columns["advantage"])
        assert ours.rollout == theirs.rollout


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5))
def test_any_packing_survives(lengths: list[list[int]]) -> None:
    sent = [[sequence(length, 10 * length) for length in batch] for batch in lengths]
    share = RankBatch.from_micro_batches(sent)
    assert (share.tokens.dtype, share.mask.dtype, share.lengths.dtype) == (np.int32, np.bool_, np.int32)
    assert all(column.dtype == np.float32 for column in share.columns.values())
    assert len(share.tokens) == len(share.mask) == sum(map(sum, lengths))
    back = share.micro_batches()
    assert [[one.tokens.tolist() for one in batch] for batch in back] == [[s.tokens.tolist() for s in b] for b in sent]


def test_sequences_that_come_back_are_views_of_the_columns() -> None:
    share = RankBatch.from_micro_batches([[sequence(3, 0), sequence(2, 5)]])
    for one in share.micro_batches()[0]:
        assert np.shares_memory(one.tokens, share.tokens)
        assert np.shares_memory(one.columns["advantage"], share.columns["advantage"])


def test_a_rank_without_sequences_has_empty_columns() -> None:
    assert RankBatch.from_micro_batches([[], []]).micro_batches() == [[], []]


def test_a_column_travels_and_is_packed_with_its_own_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "routes", Column("routes", "int16", (2,)))
    rows = [np.arange(2 * length, dtype=np.int16).reshape(length, 2) for length in (3, 2)]
    sent = [replace(sequence(len(row), 0), columns={"routes": row}) for row in rows]
    [back] = RankBatch.from_micro_batches([sent]).micro_batches()
    assert [each.columns["routes"].tolist() for each in back] == [row.tolist() for row in rows]
    packed = pack(back, torch.device("cpu")).columns["routes"]
    assert packed.dtype == torch.int16 and packed.tolist() == [*rows[0].tolist(), *rows[1].tolist()]
