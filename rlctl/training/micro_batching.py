"""Training samples, and the plan that assigns each to a rank and a micro-batch. Pure, no torch.

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

    def __str__(self) -> str:
        """Return `2.5 micro-batches a rank and step, 93% full`."""
        balance = f"; the busiest rank has {self.busiest:.2f} times the mean" if self.busiest >= 1.005 else ""
        plural = "" if self.micro_batches == 1 else "es"
        return f"{self.micro_batches:.3g} micro-batch{plural} a rank and step, {self.filled:.0%} full{balance}"


def packing(batches: Iterable[list[int]], ranks: int, max_tokens: int) -> PackingStats:
    """Measure `plan_micro_batches` on the lengths of each step's sequences."""
    steps = tokens = room = busiest = 0
    for lengths in batches:
        plan = plan_micro_batches(lengths, ranks, max_tokens)
        steps += 1
        tokens += sum(lengths)
        room += ranks * len(plan[0]) * max_tokens
        busiest += max(sum(lengths[index] for batch in rank for index in batch) for rank in plan)
    micro_batches = room / max(1, ranks * max_tokens * steps)
    return PackingStats(steps, micro_batches, tokens / max(1, room), busiest * ranks / max(1, tokens))


def rollout_index(rollouts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the index of each row's rollout, int64 [rows], counted from 0 in the order of first appearance.

    rollouts: `TrainingSample.rollout` of each row; a row with None is a whole rollout.
    """
    known: dict[int | tuple[int], int] = {}
    keys: list[int | tuple[int]] = [(row,) if each is None else each for row, each in enumerate(rollouts)]
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def plan_whole_rollouts(
    lengths: list[int], rollouts: NDArray[np.int64], ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Return `plan_micro_batches` with all rows of a rollout in one micro-batch. rollouts: see `rollout_index`.

    Raises ValueError for a rollout whose rows have more than `max_tokens` tokens together.
    """
    rows: list[list[int]] = [[] for _ in range(int(rollouts.max(initial=-1)) + 1)]
    for row, rollout in enumerate(rollouts):
        rows[rollout].append(row)
    totals = [sum(lengths[row] for row in one) for one in rows]
    for one, total in zip(rows, totals):
        if total > max_tokens and len(one) > 1:
            raise ValueError(
                f"a rollout has {len(one)} rows of {total} tokens together, a micro-batch at most {max_tokens}, and "
                "grpo.loss needs whole rollouts: raise trainer.micro_batch_tokens"
            )
    plan = plan_micro_batches(totals, ranks, max_tokens)
    return [[sorted(row for index in batch for row in rows[index]) for batch in rank] for rank in plan]


def plan_micro_batches(lengths: list[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Share sequences out: result[rank][micro_batch] is a list of indices into `lengths`.

    Every index is there exactly once. No micro-batch holds more than `max_tokens` tokens. All ranks have equally many
    micro-batches, of which some at the end may be empty. The longest sequence comes first; each goes to the rank with
    the fewest tokens, then to that rank's first micro-batch with room. Raises ValueError for a sequence longer than
    `max_tokens`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"sequence {order[0]} has {lengths[order[0]]} tokens, a micro-batch at most {max_tokens}: "
            "raise trainer.micro_batch_tokens"
        )
    heap = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(i)
        heapq.heappush(heap, (tokens + lengths[i], rank))
    plan = [_first_fit(share, lengths, max_tokens) for share in shares]
    most = max(len(batches) for batches in plan)
    return [batches + [[] for _ in range(most - len(batches))] for batches in plan]


def _first_fit(share: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Put each of `share`, longest first, into the first micro-batch with room; indices ascend within one."""
    batches: list[list[int]] = []
    room: list[int] = []
    for i in share:
        fit = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if fit is None:
            fit = len(batches)
            batches.append([])
            room.append(max_tokens)
        batches[fit].append(i)
        room[fit] -= lengths[i]
    return [sorted(batch) for batch in batches]
