"""Training samples, and the plan of which rank trains which of them in which micro-batch: pure, no torch.

Ranks run their collectives in lockstep, so every rank gets the same number of micro-batches. Where several ranks train
the same sequences, "rank" here means all of them together.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingSample:
    """One rollout or chat of T tokens.

    Everything is aligned to its token: index t of a mask, a log-prob or a field is about tokens[t] given tokens[:t].
    Index 0 has no context, so its mask is false.
    """

    # int32 [T].
    tokens: NDArray[np.int32]
    # bool [T]: true where the token counts.
    mask: NDArray[np.bool_]
    # name -> float32 [T].
    fields: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PackingStats:
    """Fill of the micro-batches of some steps."""

    steps: int
    # Of a rank, mean over the steps.
    micro_batches: float
    # Tokens over the room in all micro-batches, those that only keep ranks in step included.
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
