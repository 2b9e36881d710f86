"""Training samples, and the plan that assigns each to a rank and a micro-batch. Pure, no torch.

A micro-batch is a pack, its sequences end to end. For a model that cannot be packed it has a row for each sequence, all
as long as its longest, and computes rows times longest tokens.

Ranks run their collectives in lockstep, so every rank gets the same number of micro-batches. Ranks that train the same
sequences count as one rank here.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingSample:
    """One row of T tokens: a chat, or a rollout, or one of the rows of a rollout whose history was rewritten.

    Everything is aligned to its token: index t of a mask, a log-prob or a field is about tokens[t] given tokens[:t].
    Index 0 has no context, so its mask is false.
    """

    # int32 [T].
    tokens: NDArray[np.int32]
    # bool [T]: true where the token counts.
    mask: NDArray[np.bool_]
    # Name -> [T, *shape], the columns of `preflight.columns.COLUMNS`.
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    # Number of the rollout within an update's part, the same in each of its rows. None: the row is a whole rollout.
    rollout: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PackingStats:
    """Fill of the micro-batches of some steps."""

    steps: int
    # Micro-batches of a rank, mean over the steps.
    micro_batches: float
    # Tokens over the room of all micro-batches. Empty ones, which keep ranks in step, count too.
    filled: float
    # Tokens of the rank with most, over the mean.
    busiest: float
    # Share of the computed tokens that fill rows up; 0 for packs.
    padding: float = 0.0

    def __str__(self) -> str:
        """Return `2.5 micro-batches a rank and step, 93% full`."""
        balance = f"; the busiest rank has {self.busiest:.2f} times the mean" if self.busiest >= 1.005 else ""
        plural = "" if self.micro_batches == 1 else "es"
        rows = f"; one sequence a row, {self.padding:.0%} of the computed tokens are padding" if self.padding else ""
        return f"{self.micro_batches:.3g} micro-batch{plural} a rank and step, {self.filled:.0%} full{balance}{rows}"


def packing(batches: Iterable[list[int]], ranks: int, max_tokens: int, padded: bool = False) -> PackingStats:
    """Measure `plan_micro_batches` on the lengths of each step's sequences."""
    steps = tokens = room = busiest = computed = 0
    for lengths in batches:
        plan = plan_micro_batches(lengths, ranks, max_tokens, padded)
        computed += row_tokens(plan, lengths) if padded else sum(lengths)
        steps += 1
        tokens += sum(lengths)
        room += ranks * len(plan[0]) * max_tokens
        busiest += max(sum(lengths[index] for batch in rank for index in batch) for rank in plan)
    micro_batches = room / max(1, ranks * max_tokens * steps)
    padding = 1 - tokens / max(1, computed)
    return PackingStats(steps, micro_batches, tokens / max(1, room), busiest * ranks / max(1, tokens), padding)


def row_tokens(plan: list[list[list[int]]], lengths: list[int]) -> int:
    """Return the tokens that are computed where each sequence has a row: those of all rows, padding too."""
    batches = ([lengths[index] for index in batch] for rank in plan for batch in rank)
    return sum(len(batch) * max(batch) for batch in batches if batch)


def rollout_index(rollouts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the index of each row's rollout, int64 [rows], counted from 0 in the order of first appearance.

    rollouts: `TrainingSample.rollout` of each row; a row with None is a whole rollout.
    """
    known: dict[int | tuple[int], int] = {}
    keys: list[int | tuple[int]] = [(row,) if each is None else each for row, each in enumerate(rollouts)]
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def plan_whole_rollouts(
    lengths: list[int], rollouts: NDArray[np.int64], ranks: int, max_tokens: int, padded: bool = False
) -> list[list[list[int]]]:
    """Return `plan_micro_batches` with all rows of a rollout in one micro-batch. rollouts: see `rollout_index`.

    Raises ValueError for a rollout whose rows have more than `max_tokens` tokens together, padding included.
    """
    rows: list[list[int]] = [[] for _ in range(int(rollouts.max(initial=-1)) + 1)]
    for row, rollout in enumerate(rollouts):
        rows[rollout].append(row)
    items = [_Item.from_lengths([lengths[row] for row in one], padded) for one in rows]
    for item in items:
        if item.tokens > max_tokens and item.rows > 1:
            raise ValueError(
                f"a rollout has {item.rows} rows of {item.tokens} tokens together, a micro-batch at most {max_tokens}, "
                "and grpo.loss needs whole rollouts: raise trainer.micro_batch_tokens"
            )
    plan = _plan(items, ranks, max_tokens, padded)
    return [[sorted(row for index in batch for row in rows[index]) for batch in rank] for rank in plan]


def plan_micro_batches(lengths: list[int], ranks: int, max_tokens: int, padded: bool = False) -> list[list[list[int]]]:
    """Share sequences out: result[rank][micro_batch] is a list of indices into `lengths`.

    Every index is there exactly once. No micro-batch holds more than `max_tokens` tokens. All ranks have equally many
    micro-batches, of which some at the end may be empty. The longest sequence comes first; each goes to the rank with
    the fewest tokens, then to that rank's first micro-batch with room. Raises ValueError for a sequence longer than
    `max_tokens`.

    padded: sequences have a row each. Padding counts then, and no row of a micro-batch is below half of its longest.
    """
    return _plan([_Item(1, length, length) for length in lengths], ranks, max_tokens, padded)


@dataclass(frozen=True)
class _Item:
    """One sequence, or all rows of a rollout, in one micro-batch."""

    rows: int
    longest: int
    # Tokens that it computes.
    tokens: int

    @classmethod
    def from_lengths(cls, lengths: list[int], padded: bool) -> "_Item":
        rows, longest = len(lengths), max(lengths)
        return cls(rows, longest, rows * longest if padded else sum(lengths))


def _plan(items: list[_Item], ranks: int, max_tokens: int, padded: bool) -> list[list[list[int]]]:
    order = sorted(range(len(items)), key=lambda i: (-(items[i].longest if padded else items[i].tokens), i))
    most = max(order, key=lambda i: items[i].tokens, default=0)
    if order and items[most].tokens > max_tokens:
        raise ValueError(
            f"sequence {most} has {items[most].tokens} tokens, a micro-batch at most {max_tokens}: "
            "raise trainer.micro_batch_tokens"
        )
    heap = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(i)
        heapq.heappush(heap, (tokens + items[i].tokens, rank))
    plan = [_first_fit(share, items, max_tokens, padded) for share in shares]
    count = max(len(batches) for batches in plan)
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def _first_fit(share: list[int], items: list[_Item], max_tokens: int, padded: bool) -> list[list[int]]:
    """Put each of `share`, longest first, into the first micro-batch with room; indices ascend within one."""
    batches: list[list[int]] = []
    room: list[int] = []
    for i in share:
        # Tokens that it takes of each micro-batch, whose first item has its longest row.
        widths = [items[i].rows * items[batch[0]].longest if padded else items[i].tokens for batch in batches]
        near = [not padded or 2 * items[i].longest >= items[batch[0]].longest for batch in batches]
        fit = next((b for b, free in enumerate(room) if near[b] and free >= widths[b]), None)
        if fit is None:
            fit = len(batches)
            batches.append([])
            room.append(max_tokens)
            widths.append(items[i].tokens)
        batches[fit].append(i)
        room[fit] -= widths[fit]
    return [sorted(batch) for batch in batches]
