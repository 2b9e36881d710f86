"""Checksums of tensors' bytes that CPU and GPU compute alike: one pass, integer arithmetic, places count.

Words of 8 bytes are summed in rows of 4 KiB; the rows' sums, their high bits folded in, count by the row's odd
factor, modulo 2^64. A flipped bit always changes it, and so do rows that changed places. Bytes beyond the last
whole row count one by one.
"""

from itertools import accumulate

import torch
from torch import Tensor

ROW = 512
FACTOR = 1_000_003


def lies_right(tensor: Tensor) -> bool:
    """Whether `lay` finds its bytes as they lie in memory; a copy otherwise."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


@torch.no_grad()
def lay(tensor: Tensor) -> Tensor:
    """uint8 [n], a tensor's bytes as `ChecksumTable` goes over them."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw


class ChecksumTable:
    """Checksums of at most `count` tensors of a device, one after the other; its host never waits."""

    def __init__(self, count: int, device: torch.device) -> None:
        """On CUDA the memory for them is made on the current stream."""
        self._count, self._added = count, 0
        self._there = torch.zeros(count, dtype=torch.int64, device=device) if device.type == "cuda" else None
        self._rows: list[Tensor] = []
        self._rests: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, raw: Tensor) -> None:
        """The pass over the bytes of the next one, from `lay`; queued on the current stream."""
        assert self._added < self._count, "a kernel would write beyond the memory"
        if self._there is not None:
            from rlctl.refit.checksum_cuda import add

            add(raw, self._there, self._added)
        else:
            whole = raw.numel() // (8 * ROW) * (8 * ROW)
            self._rows.append(raw[:whole].view(torch.int64).view(-1, ROW).sum(1))
            if whole < raw.numel():
                self._rests[self._added] = _rest(raw[whole:])
        self._added += 1

    @torch.no_grad()
    def all(self) -> Tensor:
        """int64 [n], in the order of `add`, on the device."""
        if self._there is not None:
            return self._there[: self._added]
        totals = _weighted(self._rows) if self._rows else torch.zeros(0, dtype=torch.int64)
        for number, rest in self._rests.items():
            totals[number] += rest
        return totals


def _rest(raw: Tensor) -> Tensor:
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    tail = raw[words.numel() * 8 :]
    return words.sum() * FACTOR + tail.sum(dtype=torch.int64) * (FACTOR * FACTOR)


def _weighted(sums: list[Tensor]) -> Tensor:
    """int64 [n]: each tensor's row sums (int64 [its rows], n of them), folded, times the rows' factors, added up.

    As differences of a running sum, exact modulo 2^64: few operations, however many tensors.
    """
    rows, counts = torch.cat(sums), [len(part) for part in sums]
    rows ^= rows >> 32 & 0xFFFFFFFF
    factors = torch.arange(max(counts)) * 2 + 3
    rows *= torch.cat([factors[:count] for count in counts])
    running = rows.new_zeros(len(rows) + 1)
    torch.cumsum(rows, 0, out=running[1:])
    return running[[*accumulate(counts, initial=0)]].diff()
