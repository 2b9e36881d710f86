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


def is_laid_out(tensor: Tensor) -> bool:
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
        self._count = count
        self._added = 0
        self._device_sums = torch.zeros(count, dtype=torch.int64, device=device) if device.type == "cuda" else None
        # On a CPU: each tensor's sums of whole rows, and the sum of its bytes beyond them, by its number.
        self._row_sums: list[Tensor] = []
        self._tail_sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, raw: Tensor) -> None:
        """Queue the pass over the bytes of the next tensor (from `lay`) on the current stream."""
        assert self._added < self._count, "a kernel would write beyond the memory"
        if self._device_sums is not None:
            from rlctl.refit.checksum_cuda import add

            add(raw, self._device_sums, self._added, ROW, FACTOR)
        else:
            row_bytes = raw.numel() // (8 * ROW) * (8 * ROW)
            self._row_sums.append(raw[:row_bytes].view(torch.int64).view(-1, ROW).sum(1))
            if row_bytes < raw.numel():
                self._tail_sums[self._added] = _sum_tail(raw[row_bytes:])
        self._added += 1

    def add_fixed(self, fixed: "FixedTensors") -> None:
        """Queue the pass over the next tensors on the current stream."""
        assert self._added + len(fixed.tensors) <= self._count, "a kernel would write beyond the memory"
        if self._device_sums is not None and fixed.table:
            from rlctl.refit.checksum_cuda import add_all

            table, blocks = fixed.table
            add_all(table, blocks, self._device_sums, self._added, ROW, FACTOR)
            self._added += len(fixed.tensors)
        else:
            for tensor in fixed.tensors:
                self.add(lay(tensor))

    @torch.no_grad()
    def all(self) -> Tensor:
        """Return int64 [n], in the order of `add`, on the device."""
        if self._device_sums is not None:
            return self._device_sums[: self._added]
        totals = _weight_rows(self._row_sums) if self._row_sums else torch.zeros(0, dtype=torch.int64)
        for number, tail_sum in self._tail_sums.items():
            totals[number] += tail_sum
        return totals


class FixedTensors:
    """Tensors of one device that are summed many times, where they are; on CUDA by one kernel.

    One kernel for each of the 504 tensors of an adapter would take the host 5 ms.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.table: tuple[Tensor, Tensor] | None = None
        if tensors and tensors[0].is_cuda:
            from rlctl.refit.checksum_cuda import make_table

            self.table = make_table(tensors, ROW)

    def queue(self, device: torch.device) -> "QueuedSums":
        """Queue the checksums of all tensors on the current stream."""
        table = ChecksumTable(len(self.tensors), device)
        table.add_fixed(self)
        return QueuedSums(table.all())


class QueuedSums:
    """Checksums on their way to the host. Reading them does not wait for work that was queued after them."""

    def __init__(self, sums: Tensor) -> None:
        """sums: int64 [n] on the device."""
        self._host = sums
        if sums.is_cuda:
            self._host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._host.copy_(sums, non_blocking=True)
        self._arrival = mark_here(sums.device)

    def read(self) -> list[int]:
        """Return the checksums once they are on the host."""
        self._arrival.wait()
        return [int(checksum) for checksum in self._host.tolist()]


class StreamingChecksums:
    """Checksums of the items that one end sends or receives, one refit after the other, taken while other chunks
    travel.

    Queue items with `queue` and `queue_unmoved`, then ask for all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = DeviceStream(device)
        # Items of fixed memory as `lay` returns them, by item and slot.
        self._laid_items: dict[tuple[int, int], Tensor] = {}
        # By slot and items.
        self._fixed: dict[tuple[int, tuple[int, ...]], FixedTensors] = {}
        self.start(0)

    def start(self, count: int) -> None:
        """Begin a refit of which at most `count` items are summed."""
        self._numbers: list[int] = []
        self._values: dict[int, int] | None = None
        with self._stream as stream:
            self._totals = ChecksumTable(count, self._device)
            self._start_event = stream.mark()

    def queue(self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None = None) -> None:
        """Queue the checksums of items in memory that is soon used again, on the current stream.

        tensor: returns the item of a number. slot: where an item has the same memory at every refit; None: it has new
        memory each time.
        """
        if numbers:
            self._start_event.lead()
        if fixed := self._find_fixed(numbers, tensor, slot):
            self._totals.add_fixed(fixed)
        else:
            for number in numbers:
                self._totals.add(self._lay_item(number, tensor, slot))
        self._numbers += numbers

    def queue_unmoved(self, tensors: dict[int, Tensor], arrived: DeviceEvent, slot: int = 0) -> None:
        """Queue the checksums of items that are not moved, on a separate stream once `arrived` is reached."""
        if tensors:
            with self._stream as stream:
                stream.follow_mark(arrived)
                self.queue(tensors, tensors.__getitem__, slot)

    def all(self) -> Tensor | None:
        """Return int64 [n] on the current stream, in the order of `queue`; None if nothing was queued.

        Only for a refit that called `queue` alone.
        """
        return self._totals.all() if self._numbers else None

    def values(self, queued_on: DeviceStream | None = None) -> dict[int, int]:
        """Return every item's checksum, computed at the first call of a refit; nothing is queued afterwards.

        queued_on: stream on which `queue` was called, unless the device has finished it.
        """
        if self._values is None:
            with self._stream as stream:
                if queued_on:
                    stream.follow_mark(queued_on.mark())
                self._values = dict(zip(self._numbers, self._totals.all().tolist())) if self._numbers else {}
        return self._values

    def close(self) -> None:
        """Free all memory."""
        self._laid_items = {}
        self._fixed = {}
        self.start(0)

    def _find_fixed(
        self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None
    ) -> FixedTensors | None:
        """Return the tensors for one kernel, None if they go one by one."""
        if slot is None or self._device.type != "cuda" or len(numbers) < _TOGETHER:
            return None
        key = (slot, tuple(numbers))
        if key not in self._fixed:
            self._fixed[key] = FixedTensors([tensor(number) for number in numbers])
        return self._fixed[key] if self._fixed[key].table else None

    def _lay_item(self, number: int, tensor: Callable[[int], Tensor], slot: int | None) -> Tensor:
        # Laid out once where that makes no copy: it takes the host as long as to queue the sum itself.
        if slot is not None and (number, slot) in self._laid_items:
            return self._laid_items[number, slot]
        item = tensor(number)
        laid = lay(item)
        if slot is not None and is_laid_out(item):
            self._laid_items[number, slot] = laid
        return laid


def _sum_tail(raw: Tensor) -> Tensor:
    """Return the sum of bytes beyond the last whole row, int64 []: words count by one factor, bytes by its square."""
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    last_bytes = raw[words.numel() * 8 :]
    return words.sum() * FACTOR + last_bytes.sum(dtype=torch.int64) * (FACTOR * FACTOR)


def _weight_rows(row_sums: list[Tensor]) -> Tensor:
    """Return int64 [n]: each of n tensors' row sums (int64 [its rows]), folded, times the rows' factors, summed.

    As differences of a running sum, exact modulo 2^64: few operations, however many tensors.
    """
    rows = torch.cat(row_sums)
    counts = [len(tensor_rows) for tensor_rows in row_sums]
    rows ^= rows >> 32 & 0xFFFFFFFF
    factors = torch.arange(max(counts)) * 2 + 3
    rows *= torch.cat([factors[:count] for count in counts])
    running = rows.new_zeros(len(rows) + 1)
    torch.cumsum(rows, 0, out=running[1:])
    return running[[*accumulate(counts, initial=0)]].diff()
