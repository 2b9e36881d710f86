"""Checksums of tensors' bytes that CPU and GPU compute alike: one pass, integer arithmetic, places count."""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

# A tensor's bytes: int64 [whole rows, words of a row], and uint8 [bytes beyond them], if there are any.
Laid = tuple[Tensor, Tensor | None]
# Of a tensor: int64 [whole rows], their sums, and what the bytes beyond them count, int64 [], if there are any.
Partial = tuple[Tensor, Tensor | None]

_ROW = 512
_FACTOR = 1_000_003


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """int64 [n] of several tensors of one device, on it; equal on every device for equal bytes. Each is let go before
    the next is asked for.

    Words of 8 bytes are summed in rows of 4 KiB; the rows' sums, their high bits folded in, count by the row's odd
    factor, modulo 2^64. A flipped bit always changes it, and so do rows that changed places. Bytes beyond the last
    whole row count one by one.
    """
    return finish(list(map(partial, map(lay, tensors))))


def checksum(tensor: Tensor) -> int:
    """Of one tensor; waits for its device."""
    return int(checksums([tensor])[0])


def lies_right(tensor: Tensor) -> bool:
    """Whether `lay` finds its bytes as they lie in memory; a copy otherwise."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


@torch.no_grad()
def lay(tensor: Tensor) -> Laid:
    """A tensor's bytes as `partial` goes over them."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // (8 * _ROW) * (8 * _ROW)
    return raw[:whole].view(torch.int64).view(-1, _ROW), raw[whole:] if whole < raw.numel() else None


@torch.no_grad()
def partial(laid: Laid) -> Partial:
    """The pass over a tensor's bytes; `finish` makes checksums of many."""
    rows, rest = laid
    return rows.sum(1), None if rest is None else _rest(rest)


@torch.no_grad()
def finish(partials: list[Partial]) -> Tensor:
    """int64 [n]: the checksums of `partials`, on their device."""
    if not partials:
        return torch.zeros(0, dtype=torch.int64)
    totals = _totals([rows for rows, _ in partials])
    for number, (_, rest) in enumerate(partials):
        if rest is not None:
            totals[number].add_(rest)
    return totals


def _rest(raw: Tensor) -> Tensor:
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    rest = words.sum() * _FACTOR
    tail = raw[words.numel() * 8 :]
    return rest + tail.sum(dtype=torch.int64) * (_FACTOR * _FACTOR) if tail.numel() else rest


def _totals(sums: list[Tensor]) -> Tensor:
    """int64 [n]: each tensor's row sums (int64 [its rows], n of them), folded, times the rows' factors, added up.

    As differences of a running sum, exact modulo 2^64: a kernel a tensor would take longer to start than to run, and
    adding up by index makes millions of rows queue for a few addresses. The factors are made where they are used:
    kept ones would need care, several streams using them, and making them takes no time. The host never waits.
    """
    rows, counts = torch.cat(sums), [len(part) for part in sums]
    rows ^= rows >> 32 & 0xFFFFFFFF
    factors = torch.arange(max(counts), device=rows.device) * 2 + 3
    rows *= torch.cat([factors[:count] for count in counts])
    running = rows.new_zeros(len(rows) + 1)
    torch.cumsum(rows, 0, out=running[1:])
    return torch.cat([running[end : end + 1] for end in accumulate(counts, initial=0)]).diff()
