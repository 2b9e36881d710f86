from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.training.micro_batching import (
    PackingStats,
    packing,
    plan_micro_batches,
    plan_whole_rollouts,
    rollout_index,
    row_tokens,
)

lengths_and_limit = st.lists(st.integers(1, 50), max_size=60).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths, default=1), 120))
)


def sequences_of(plan: list[list[list[int]]]) -> list[int]:
    """Return the indices of the sequences of every micro-batch."""
    return list(chain.from_iterable(chain.from_iterable(plan)))


def lengths_by_batch(plan: list[list[list[int]]], lengths: list[int]) -> list[list[int]]:
    """Return the lengths of each micro-batch's sequences."""
    return [[lengths[index] for index in batch] for batch in chain.from_iterable(plan)]


def tokens_by_rank(plan: list[list[list[int]]], lengths: list[int]) -> list[int]:
    return [sum(lengths[index] for index in chain.from_iterable(batches)) for batches in plan]


@given(lengths_and_limit, st.integers(1, 8))
def test_every_sequence_stands_exactly_once(case: tuple[list[int], int], ranks: int) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit)
    assert sorted(sequences_of(plan)) == list(range(len(lengths)))


@given(lengths_and_limit, st.integers(1, 8))
def test_no_micro_batch_is_above_the_limit_and_all_ranks_have_equally_many(
    case: tuple[list[int], int], ranks: int
) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit)
    assert len(plan) == ranks and len({len(batches) for batches in plan}) == 1
    assert all(sum(batch_lengths) <= limit for batch_lengths in lengths_by_batch(plan, lengths))


@given(lengths_and_limit, st.integers(1, 8))
def test_ranks_differ_by_at_most_the_longest_sequence(case: tuple[list[int], int], ranks: int) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit)
    tokens = tokens_by_rank(plan, lengths)
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(lengths_and_limit, st.integers(1, 8))
def test_no_rank_has_more_than_an_even_number_of_the_longest_sequences(case: tuple[list[int], int], ranks: int) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit)
    tokens = tokens_by_rank(plan, lengths)
    assert max(tokens) <= -(-len(lengths) // ranks) * max(lengths, default=0)


@given(lengths_and_limit, st.integers(1, 8))
def test_empty_micro_batches_are_only_padding_at_the_end(case: tuple[list[int], int], ranks: int) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit)
    for batches in plan:
        assert sorted(batches, key=lambda batch: not batch) == batches
    for number in range(len(plan[0])):
        assert any(batches[number] for batches in plan)


@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 5)), max_size=30), st.integers(1, 4))
def test_rows_of_a_rollout_are_in_one_micro_batch(rows: list[tuple[int, int | None]], ranks: int) -> None:
    lengths = [length for length, _ in rows]
    rollouts = rollout_index([rollout for _, rollout in rows])
    tokens_by_rollout = Counter[int]()
    for length, rollout in zip(lengths, rollouts.tolist()):
        tokens_by_rollout[rollout] += length
    limit = max([9, *tokens_by_rollout.values()])
    plan = plan_whole_rollouts(lengths, rollouts, ranks, limit)
    assert sorted(sequences_of(plan)) == list(range(len(rows)))
    assert all(sum(batch_lengths) <= limit for batch_lengths in lengths_by_batch(plan, lengths))
    rollouts_by_batch = [{int(rollouts[row]) for row in batch} for batch in chain.from_iterable(plan)]
    assert sum(map(len, rollouts_by_batch)) == len(tokens_by_rollout)


def test_short_sequences_fill_the_gaps_that_long_ones_leave() -> None:
    assert plan_micro_batches([6, 4, 6, 4], 1, 10) == [[[0, 1], [2, 3]]]


def test_a_sequence_above_the_limit_names_the_knob() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens.*trainer\.micro_batch_tokens"):
        plan_micro_batches([3, 11], 2, 10)


def test_packing_counts_room_that_only_keeps_ranks_in_step() -> None:
    # Rank 0 gets the sequence of 60 tokens, rank 1 those of 40 and 10. Each rank has one micro-batch.
    assert packing([[60, 40, 10]], 2, 100) == PackingStats(1, 1.0, 110 / 200, pytest.approx(60 / 55))
    # One rank needs two micro-batches, so the other rank gets an empty second micro-batch.
    of_two_steps = packing([[90, 80, 20], [50]], 2, 100)
    assert of_two_steps == PackingStats(2, 1.0, 240 / 400, pytest.approx((100 + 50) * 2 / 240))
    assert str(packing([[100, 100, 50]], 1, 100)) == "3 micro-batches a rank and step, 83% full"


def test_what_packs_badly_says_so() -> None:
    assert str(packing([[90, 60]], 2, 100)).endswith("75% full; the busiest rank has 1.20 times the mean")


@given(lengths_and_limit, st.integers(1, 4))
def test_rows_and_their_padding_are_within_the_limit_and_no_row_is_below_half(
    case: tuple[list[int], int], ranks: int
) -> None:
    lengths, limit = case
    plan = plan_micro_batches(lengths, ranks, limit, padded=True)
    assert sorted(sequences_of(plan)) == list(range(len(lengths)))
    assert len(plan) == ranks and len({len(batches) for batches in plan}) == 1
    for rows in lengths_by_batch(plan, lengths):
        if rows:
            assert len(rows) * max(rows) <= limit and 2 * min(rows) >= max(rows)


def test_padding_is_counted() -> None:
    plan = plan_micro_batches([10, 6, 4], 1, 20, padded=True)
    assert plan == [[[0, 1], [2]]] and row_tokens(plan, [10, 6, 4]) == 24
    stats = packing([[10, 6, 4]], 1, 20, padded=True)
    assert stats.padding == pytest.approx(4 / 24)
    assert str(stats).endswith("50% full; one sequence a row, 17% of the computed tokens are padding")
    assert "padding" not in str(packing([[10, 6, 4]], 1, 20))


def test_rows_of_a_rollout_count_with_their_padding() -> None:
    rollouts = rollout_index([0, 0, 1])
    assert plan_whole_rollouts([8, 2, 6], rollouts, 1, 24, padded=True) == [[[0, 1, 2]]]
    assert plan_whole_rollouts([8, 2, 6], rollouts, 1, 16) == [[[0, 1, 2]]]
    with pytest.raises(ValueError, match="2 rows of 16 tokens together, a micro-batch at most 15"):
        plan_whole_rollouts([8, 2, 6], rollouts, 1, 15, padded=True)
