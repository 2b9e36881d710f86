"""A rank's micro-batches survive the journey as columns."""

import numpy as np

from rlctl.training.sequences import Sequence
from rlctl.training.worker import Share


def sequence(length: int, start: int) -> Sequence:
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Sequence(tokens, tokens % 2 == 0, {"advantage": tokens.astype(np.float32) / 7})


def test_micro_batches_come_back_as_they_went() -> None:
    sent = [[sequence(3, 0), sequence(5, 10)], [], [sequence(1, 20)]]
    back = Share.of(sent).micro_batches()
    assert [len(batch) for batch in back] == [2, 0, 1]
    for ours, theirs in zip((s for b in sent for s in b), (s for b in back for s in b)):
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.mask, theirs.mask)
        assert np.array_equal(ours.fields["advantage"], theirs.fields["advantage"])


def test_a_rank_without_sequences_has_empty_columns() -> None:
    assert Share.of([[], []]).micro_batches() == [[], []]
