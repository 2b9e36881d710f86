"""Checksums of tensors' bytes that CPU and GPU compute alike: one pass, integer arithmetic, places count."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

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
    sums: list[Tensor] = []
    rests: dict[int, Tensor] = {}
    for number, raw in enumerate(map(_bytes, tensors)):
        whole = raw.numel() // (8 * _ROW) * (8 * _ROW)
        sums.append(raw[:whole].view(torch.int64).view(-1, _ROW).sum(1))
        if whole < raw.numel():
            rests[number] = _rest(raw[whole:])
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    rows, device = torch.cat(sums), sums[0].device
    factors, owners = _weights(tuple(map(len, sums)), device)
    totals = torch.zeros(len(sums), dtype=torch.int64, device=device)
    totals.index_add_(0, owners, (rows ^ (rows >> 32 & 0xFFFFFFFF)) * factors)
    for number, rest in rests.items():
        totals[number] += rest
    return totals


def checksum(tensor: Tensor) -> int:
    """Of one tensor; waits for its device."""
    return int(checksums([tensor])[0])


def _bytes(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw


def _rest(raw: Tensor) -> Tensor:
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    return words.sum() * _FACTOR + raw[words.numel() * 8 :].sum(dtype=torch.int64) * (_FACTOR * _FACTOR)


@lru_cache(maxsize=1024)
def _weights(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Each row's factor, by its place in its tensor, and that tensor's number.

    From the host, and waited for: several streams use them, of which the first alone would know when they are there.
    """
    factors = torch.cat([torch.arange(n, dtype=torch.int64) * 2 + 3 for n in counts])
    owners = torch.cat([torch.full((n,), number) for number, n in enumerate(counts)])
    return factors.to(device), owners.to(device)
