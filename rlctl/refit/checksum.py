"""Checksums of tensors' bytes that CPU and GPU compute alike: one pass, integer arithmetic, places count."""

from functools import lru_cache

import torch
from torch import Tensor

_ROW = 512
_FACTOR = 1_000_003


@torch.no_grad()
def checksums(tensors: list[Tensor]) -> Tensor:
    """int64 [n] of several tensors of one device, on it; equal on every device for equal bytes.

    Words of 8 bytes are summed in rows of 4 KiB; the rows' sums, their high bits folded in, count by the row's odd
    factor, modulo 2^64. A flipped bit always changes it, and so do rows that changed places. Bytes beyond the last
    whole row count one by one.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    raws = [_bytes(tensor) for tensor in tensors]
    counts = tuple(raw.numel() // (8 * _ROW) for raw in raws)
    rows = torch.cat([raw[: n * 8 * _ROW].view(torch.int64).view(n, _ROW).sum(1) for raw, n in zip(raws, counts)])
    factors, owners = _weights(counts, device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    totals.index_add_(0, owners, (rows ^ (rows >> 32 & 0xFFFFFFFF)) * factors)
    rests = [raw[n * 8 * _ROW :] for raw, n in zip(raws, counts)]
    for number, rest in enumerate(rests):
        if rest.numel():
            totals[number] += _rest(rest)
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
    """Each row's factor, by its place in its tensor, and that tensor's number. Made without waiting for the device."""
    factors = torch.cat([torch.arange(n, dtype=torch.int64, device=device) * 2 + 3 for n in counts])
    owners = torch.cat([torch.full((n,), number, device=device) for number, n in enumerate(counts)])
    return factors, owners
