"""Checksums of tensors' bytes that CPU and GPU compute alike: one pass, integer arithmetic, places count."""

import torch
from torch import Tensor

_ROW = 512
_FACTOR = 1_000_003


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """0-d int64 on the tensor's device; equal on every device for equal bytes.

    Words of 8 bytes are summed in rows of 4 KiB; the rows' sums, their high bits folded in, count by the row's odd
    factor, modulo 2^64. A flipped bit always changes it, and so do rows that changed places. Bytes beyond the last
    whole word count one by one.
    """
    raw = tensor.contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    full = words.numel() // _ROW * _ROW
    rows = words[:full].view(-1, _ROW).sum(1)
    factors = torch.arange(rows.numel(), dtype=torch.int64, device=tensor.device) * 2 + 3
    rest = words[full:].sum() * _FACTOR + raw[words.numel() * 8 :].sum(dtype=torch.int64) * (_FACTOR * _FACTOR)
    return ((rows ^ (rows >> 32 & 0xFFFFFFFF)) * factors).sum() + rest


def checksums(tensors: list[Tensor]) -> Tensor:
    """int64 [n] of several tensors on one device."""
    return torch.stack([checksum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)
