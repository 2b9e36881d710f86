"""Training samples, and the plan that assigns each sample to a rank and a micro-batch. This module needs no torch.

A micro-batch is a pack: its sequences are concatenated. For a model that cannot be packed, a micro-batch has one row
for each sequence, padded to the longest, and computes (number of rows) x (longest length) tokens.

Ranks run their collectives in lockstep, so every rank gets the same number of micro-batches. In this module "rank"
means a data shard: ranks that train on the same sequences count as one rank.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingSample:
    """One row of T tokens: a chat, a rollout, or one row of a rollout whose history was rewritten.

    All columns are aligned to tokens: index t of the mask or of a column belongs to tokens[t] given tokens[:t]. Token 0
    has no context, so its mask is false.
    """

    # int32 [T].
    tokens: NDArray[np.int32]
    # bool [T]: true at the tokens to train on.
    mask: NDArray[np.bool_]
    # Name -> [T, *shape], the columns of `preflight.declared_columns.COLUMNS`.
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    # Number of the rollout within a part of an update, equal for all rows of the rollout. None: the row is a whole
    # rollout.
    rollout: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PackingStats:
    """Statistics on how full the micro-batches of some steps are."""

    steps: int
    # Mean number of micro-batches of a rank in a step.
    micro_batches: float
    # Tokens divided by the capacity of all micro-batches, including empty ones, which keep ranks in lockstep.
    filled: float
    # Tokens of the rank with most tokens, divided by the mean over ranks.
    busiest: float
    # Share of the computed tokens that are padding; 0 for packs.
    padding: float = 0.0

    def __str__(self) -> str:
        """Return `2.5 micro-batches a rank and step, 93% full`."""
        balance = f"; the busiest rank has {self.busiest:.2f} times the mean" if self.busiest >= 1.005 else ""
        plural = "" if self.micro_batches == 1 else "es"
        rows = f"; one sequence a row, {self.padding:.0%} of the computed tokens are padding" if self.padding else ""
        return f"{self.micro_batches:.3g} micro-batch{plural} a rank and step, {self.filled:.0%} full{balance}{rows}"


def packing(batches: Iterable[list[int]], ranks: int, max_tokens: int, padded: bool = False) -> PackingStats:
    """Return statistics of the micro-batches planned for some steps. batches: for each step its sequences' lengths."""
    steps = tokens = room = busiest = computed = 0
    for lengths in batches:
        plan = plan_micro_batches(lengths, ranks, max_tokens, padded)
        computed += row_tokens(plan, lengths) if padded else sum(lengths)
        steps += 1
        tokens += sum(lengths)
        room += ranks * len(plan[0]) * max_tokens
        busiest += max(sum(lengths[index] for index in chain.from_iterable(rank)) for rank in plan)
    return PackingStats(
        steps=steps,
        micro_batches=room / max(1, ranks * max_tokens * steps),
        filled=tokens / max(1, room),
        busiest=busiest * ranks / max(1, tokens),
        padding=1 - tokens / max(1, computed),
    )


def row_tokens(plan: list[list[list[int]]], lengths: list[int]) -> int:
    """Return the number of tokens, including padding, that are computed if each sequence has a row."""
    tokens = 0
    for batch in chain.from_iterable(plan):
        if batch:
            tokens += len(batch) * max(lengths[index] for index in batch)
    return tokens


def rollout_index(rollouts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the index of each row's rollout, int64 [rows], counted from 0 in the order of first appearance.

    rollouts: `TrainingSample.rollout` of each row; a row with None is a whole rollout.
    """
    index_of: dict[int | tuple[int], int] = {}
    indices = []
    for row, rollout in enumerate(rollouts):
        # A tuple, which differs from every rollout's number.
        key: int | tuple[int] = (row,) if rollout is None else rollout
        indices.append(index_of.setdefault(key, len(index_of)))
    return np.array(indices, np.int64)


def plan_whole_rollouts(
    lengths: list[int], rollouts: NDArray[np.int64], ranks: int, max_tokens: int, padded: bool = False
) -> list[list[list[int]]]:
    """Return a plan like that of `plan_micro_batches`, with all rows of a rollout in the same micro-batch.

    lengths: number of tokens of each row. rollouts: index of each row's rollout, from `rollout_index`.

    Raises ValueError for a rollout whose rows have more than `max_tokens` tokens together, padding included.
    """
    rollout_rows: list[list[int]] = [[] for _ in range(int(rollouts.max(initial=-1)) + 1)]
    for row, rollout in enumerate(rollouts):
        rollout_rows[rollout].append(row)
    items = [_Item.from_lengths([lengths[row] for row in rows], padded) for rows in rollout_rows]
    for item in items:
        if item.tokens > max_tokens and item.rows > 1:
            raise ValueError(
                f"a rollout has {item.rows} rows of {item.tokens} tokens together, a micro-batch at most {max_tokens}, "
                "and grpo.loss needs whole rollouts: raise trainer.micro_batch_tokens"
            )
    plan = []
    for batches in _plan_items(items, ranks, max_tokens, padded):
        rows_of_batches = [chain.from_iterable(rollout_rows[index] for index in batch) for batch in batches]
        plan.append([sorted(rows) for rows in rows_of_batches])
    return plan


def plan_micro_batches(lengths: list[int], ranks: int, max_tokens: int, padded: bool = False) -> list[list[list[int]]]:
    """Distribute sequences: return result[rank][micro_batch], a list of indices into `lengths`.

    Every index occurs exactly once. No micro-batch has more than `max_tokens` tokens. All ranks have the same number of
    micro-batches; the last ones may be empty. Sequences are assigned from the longest to the shortest: each goes to the
    rank with the fewest tokens, and there to the first micro-batch with room. Raises ValueError for a sequence longer
    than `max_tokens`.

    padded: True if each sequence has a padded row. Padding then counts as tokens, and no row of a micro-batch is
    shorter than half of the longest.
    """
    items = [_Item(rows=1, longest=length, tokens=length) for length in lengths]
    return _plan_items(items, ranks, max_tokens, padded)


@dataclass(frozen=True)
class _Item:
    """One sequence, or all rows of a rollout, which must be in one micro-batch."""

    rows: int
    longest: int
    # Number of tokens that a pass over the item computes, including padding.
    tokens: int

    @classmethod
    def from_lengths(cls, lengths: list[int], padded: bool) -> "_Item":
        rows = len(lengths)
        longest = max(lengths)
        return cls(rows, longest, rows * longest if padded else sum(lengths))


def _plan_items(items: list[_Item], ranks: int, max_tokens: int, padded: bool) -> list[list[list[int]]]:
    """Return result[rank][micro_batch], a list of indices into `items`."""

    def descending_length(index: int) -> tuple[int, int]:
        return -(items[index].longest if padded else items[index].tokens), index

    order = sorted(range(len(items)), key=descending_length)
    largest = max(order, key=lambda index: items[index].tokens, default=0)
    if order and items[largest].tokens > max_tokens:
        raise ValueError(
            f"sequence {largest} has {items[largest].tokens} tokens, a micro-batch at most {max_tokens}: "
            "raise trainer.micro_batch_tokens"
        )
    tokens_and_rank = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in order:
        tokens, rank = heapq.heappop(tokens_and_rank)
        shares[rank].append(index)
        heapq.heappush(tokens_and_rank, (tokens + items[index].tokens, rank))
    plan = [_fit_items(share, items, max_tokens, padded) for share in shares]
    count = max(len(batches) for batches in plan)
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def _fit_items(share: list[int], items: list[_Item], max_tokens: int, padded: bool) -> list[list[int]]:
    """Put each item of `share`, longest first, into the first micro-batch that has room for it.

    Return the micro-batches, each a list of indices into `items` in ascending order.
    """
    batches: list[list[int]] = []
    free_tokens: list[int] = []
    for index in share:
        item = items[index]
        for number, batch in enumerate(batches):
            # The first item of a micro-batch has its longest row.
            longest = items[batch[0]].longest
            needed_tokens = item.rows * longest if padded else item.tokens
            is_long_enough = not padded or 2 * item.longest >= longest
            if is_long_enough and free_tokens[number] >= needed_tokens:
                batch.append(index)
                free_tokens[number] -= needed_tokens
                break
        else:
            batches.append([index])
            free_tokens.append(max_tokens - item.tokens)
    return [sorted(batch) for batch in batches]
