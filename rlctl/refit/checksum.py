"""Checksums of tensors' bytes, equal on CPU and GPU: one pass, integer arithmetic, places count.

Words of 8 bytes are summed in rows of 4 KiB; the rows' sums, their high bits folded in, count by the row's odd
factor, modulo 2^64. A flipped bit always changes it, and so do rows that changed places. Bytes beyond the last
whole row count one by one.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlctl.utils.device_stream import DeviceEvent, DeviceStream, mark_here

ROW = 512
FACTOR = 1_000_003
# Least number of tensors for one kernel.
_TOGETHER = 8


def lies_right(tensor: Tensor) -> bool:
    """Return True if `lay` returns a view of the tensor's memory, False if a copy."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


@torch.no_grad()
def lay(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n], as `ChecksumTable` goes over them."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw


class ChecksumTable:
    """Checksums of at most `count` tensors of a device, one after the other; its host never waits."""

    def __init__(self, count: int, device: torch.device) -> None:
        """Allocate; on CUDA the memory belongs to the current stream."""
        self._count, self._added = count, 0
        self._there = torch.zeros(count, dtype=torch.int64, device=device) if device.type == "cuda" else None
        self._rows: list[Tensor] = []
        self._rests: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, raw: Tensor) -> None:
        """Queue the pass over the bytes of the next tensor (from `lay`) on the current stream."""
        assert self._added < self._count, "a kernel would write beyond the memory"
        if self._there is not None:
            from rlctl.refit.checksum_cuda import add

            add(raw, self._there, self._added, ROW, FACTOR)
        else:
            whole = raw.numel() // (8 * ROW) * (8 * ROW)
            self._rows.append(raw[:whole].view(torch.int64).view(-1, ROW).sum(1))
            if whole < raw.numel():
                self._rests[self._added] = _rest(raw[whole:])
        self._added += 1

    def add_fixed(self, fixed: "FixedTensors") -> None:
        """Queue the pass over the next tensors on the current stream."""
        assert self._added + len(fixed.tensors) <= self._count, "a kernel would write beyond the memory"
        if self._there is not None and fixed.table:
            from rlctl.refit.checksum_cuda import add_all

            add_all(*fixed.table, self._there, self._added, ROW, FACTOR)
            self._added += len(fixed.tensors)
        else:
            for tensor in fixed.tensors:
                self.add(lay(tensor))

    @torch.no_grad()
    def all(self) -> Tensor:
        """Return int64 [n], in the order of `add`, on the device."""
        if self._there is not None:
            return self._there[: self._added]
        totals = _weighted(self._rows) if self._rows else torch.zeros(0, dtype=torch.int64)
        for number, rest in self._rests.items():
            totals[number] += rest
        return totals


class FixedTensors:
    """Tensors of one device that are summed many times, where they are; on CUDA by one kernel.

    One kernel for each of the 504 tensors of an adapter would take the host 5 ms.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.table: tuple[Tensor, Tensor] | None = None
        if tensors and tensors[0].is_cuda:
            from rlctl.refit.checksum_cuda import table_of

            self.table = table_of(tensors, ROW)

    def queue(self, device: torch.device) -> "QueuedSums":
        """Queue the checksums of all tensors on the current stream."""
        table = ChecksumTable(len(self.tensors), device)
        table.add_fixed(self)
        return QueuedSums(table.all())


class QueuedSums:
    """Checksums on their way to the host. What is queued after them need not be done before they are read."""

    def __init__(self, sums: Tensor) -> None:
        """sums: int64 [n] on the device."""
        self._host = sums
        if sums.is_cuda:
            self._host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._host.copy_(sums, non_blocking=True)
        self._come = mark_here(sums.device)

    def read(self) -> list[int]:
        """Return them once they are there."""
        self._come.wait()
        return [int(value) for value in self._host.tolist()]


class StreamingChecksums:
    """Checksums of the items that one end sends or receives, one refit after the other, taken while other chunks
    travel.

    Queue items with `here` and `beside`, then ask for all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, DeviceStream(device)
        self._laid: dict[tuple[int, int], Tensor] = {}
        # By slot and items.
        self._fixed: dict[tuple[int, tuple[int, ...]], FixedTensors] = {}
        self.start(0)

    def start(self, count: int) -> None:
        """Begin a refit of which at most `count` items are summed."""
        self._numbers: list[int] = []
        self._values: dict[int, int] | None = None
        with self._stream as stream:
            self._totals = ChecksumTable(count, self._device)
            self._begun = stream.mark()

    def here(self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None = None) -> None:
        """Queue the checksums of items in memory that is soon used again, on the current stream.

        tensor: returns the item of a number. slot: where an item has the same memory at every refit; None: it has new
        memory each time.
        """
        if numbers:
            self._begun.lead()
        if fixed := self._together(numbers, tensor, slot):
            self._totals.add_fixed(fixed)
        else:
            for number in numbers:
                self._totals.add(self._lay(number, tensor, slot))
        self._numbers += numbers

    def beside(self, tensors: dict[int, Tensor], arrived: DeviceEvent, slot: int = 0) -> None:
        """Queue the checksums of items that are not moved, on a separate stream once `arrived` is reached."""
        if tensors:
            with self._stream as stream:
                stream.after(arrived)
                self.here(tensors, tensors.__getitem__, slot)

    def all(self) -> Tensor | None:
        """Return int64 [n] on the current stream, in the order of `here`, for users of `here` alone; None if empty."""
        return self._totals.all() if self._numbers else None

    def values(self, queued_on: DeviceStream | None = None) -> dict[int, int]:
        """Return every item's checksum, computed at the first call of a refit; nothing is queued afterwards.

        queued_on: stream on which `here` was called, unless the device has finished it.
        """
        if self._values is None:
            with self._stream as stream:
                if queued_on:
                    stream.after(queued_on.mark())
                self._values = dict(zip(self._numbers, self._totals.all().tolist())) if self._numbers else {}
        return self._values

    def close(self) -> None:
        """Free all memory."""
        self._laid, self._fixed = {}, {}
        self.start(0)

    def _together(
        self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None
    ) -> FixedTensors | None:
        """Return the tensors for one kernel, None if they go one by one."""
        if slot is None or self._device.type != "cuda" or len(numbers) < _TOGETHER:
            return None
        key = (slot, tuple(numbers))
        if key not in self._fixed:
            self._fixed[key] = FixedTensors([tensor(number) for number in numbers])
        return self._fixed[key] if self._fixed[key].table else None

    def _lay(self, number: int, tensor: Callable[[int], Tensor], slot: int | None) -> Tensor:
        # Laid out once where that makes no copy: it takes the host as long as to queue the sum itself.
        if slot is not None and (number, slot) in self._laid:
            return self._laid[number, slot]
        given = tensor(number)
        laid = lay(given)
        if slot is not None and lies_right(given):
            self._laid[number, slot] = laid
        return laid


def _rest(raw: Tensor) -> Tensor:
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    tail = raw[words.numel() * 8 :]
    return words.sum() * FACTOR + tail.sum(dtype=torch.int64) * (FACTOR * FACTOR)


def _weighted(sums: list[Tensor]) -> Tensor:
    """Return int64 [n]: each of n tensors' row sums (int64 [its rows]), folded, times the rows' factors, summed.

    As differences of a running sum, exact modulo 2^64: few operations, however many tensors.
    """
    rows, counts = torch.cat(sums), [len(part) for part in sums]
    rows ^= rows >> 32 & 0xFFFFFFFF
    factors = torch.arange(max(counts)) * 2 + 3
    rows *= torch.cat([factors[:count] for count in counts])
    running = rows.new_zeros(len(rows) + 1)
    torch.cumsum(rows, 0, out=running[1:])
    return running[[*accumulate(counts, initial=0)]].diff()
