"""Which rank trains which sequences in which micro-batch: pure, deterministic, no torch.

FSDP ranks run their collectives in lockstep, so every rank gets the same number of micro-batches.
"""

import heapq


def plan_micro_batches(lengths: list[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Share sequences out: result[rank][micro_batch] is a list of indices into `lengths`.

    Every index stands exactly once; no micro-batch holds more than `max_tokens` tokens; all ranks have equally
    many micro-batches, of which some at the end may be empty. Longest first, each to the rank with the fewest
    tokens, then first-fit within the rank. Raises ValueError for a sequence longer than `max_tokens`.
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
    """Each of `share`, longest first, into the first micro-batch with room; indices ascend within one."""
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
