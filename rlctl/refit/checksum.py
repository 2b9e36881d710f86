"""Checksums of tensors' bytes. They need one pass and integer arithmetic, and are equal on CPU and GPU.

Words of 8 bytes are summed in rows of 4 KiB. Each row's sum is folded (its high bits xor its low bits), multiplied by
the row's odd factor, and added modulo 2^64. A flipped bit always changes the checksum, and so do exchanged rows. Words
and bytes after the last whole row are added with two other factors (`_sum_tail`).
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlctl.utils.device_stream import DeviceEvent, DeviceStream, mark_here

# Words of a row, and the factor of words after the last whole row.
ROW = 512
FACTOR = 1_000_003
# At least this number of tensors are summed by one common kernel, fewer by one kernel each.
_TOGETHER = 8


def is_laid_out(tensor: Tensor) -> bool:
    """Return True if `lay` returns a view of the tensor's memory, False if a copy."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


@torch.no_grad()
def lay(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as `ChecksumTable` needs them: uint8 [n], contiguous, aligned to 8 bytes."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw


class ChecksumTable:
    """Checksums of at most `count` tensors of a device. Adding a tensor only queues work; the host does not wait."""

    def __init__(self, count: int, device: torch.device) -> None:
        """Allocate the table. On CUDA the memory belongs to the current stream."""
        self._count = count
        self._added = 0
        self._device_sums = torch.zeros(count, dtype=torch.int64, device=device) if device.type == "cuda" else None
        # On a CPU: for each tensor the sums of its whole rows, and number of a tensor -> weighted sum of the bytes
        # after its whole rows.
        self._row_sums: list[Tensor] = []
        self._tail_sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, raw: Tensor) -> None:
        """Queue the checksum of the next tensor on the current stream. raw: from `lay`."""
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
        """Queue the checksums of the next tensors on the current stream."""
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
        """Return the checksums, int64 [n] on the device, in the order of `add`."""
        if self._device_sums is not None:
            return self._device_sums[: self._added]
        totals = _weight_rows(self._row_sums) if self._row_sums else torch.zeros(0, dtype=torch.int64)
        for number, tail_sum in self._tail_sums.items():
            totals[number] += tail_sum
        return totals


class FixedTensors:
    """Tensors of one device that keep their memory, and whose checksums are computed many times; on CUDA by one kernel.

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
    """Checksums that are being copied to the host. Reading does not wait for work that was queued later."""

    def __init__(self, sums: Tensor) -> None:
        """sums: int64 [n] on the device."""
        self._host = sums
        if sums.is_cuda:
            self._host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._host.copy_(sums, non_blocking=True)
        self._arrival = mark_here(sums.device)

    def read(self) -> list[int]:
        """Wait until the checksums are on the host, and return them."""
        self._arrival.wait()
        return [int(checksum) for checksum in self._host.tolist()]


class StreamingChecksums:
    """Checksums of the items that one end sends or receives, computed while other chunks are transferred.

    For each refit: call `start`, queue items with `queue` and `queue_lasting`, then read `values` or `all`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = DeviceStream(device)
        # (item, slot) -> the item's bytes from `lay`, for items with the same memory at every refit.
        self._laid_items: dict[tuple[int, int], Tensor] = {}
        # (slot, items) -> their tensors, for one kernel.
        self._fixed: dict[tuple[int, tuple[int, ...]], FixedTensors] = {}
        self.start(0)

    def start(self, count: int) -> None:
        """Begin a refit. count: most items whose checksums are queued."""
        self._numbers: list[int] = []
        self._values: dict[int, int] | None = None
        with self._stream as stream:
            self._totals = ChecksumTable(count, self._device)
            self._start_event = stream.mark()

    def queue(self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None = None) -> None:
        """Queue the checksums of items on the current stream, because their memory is soon reused.

        tensor: returns the item of a number. slot: number of the buffer, if the items have the same memory there at
        every refit; None: they have new memory each time.
        """
        if numbers:
            self._start_event.lead()
        if fixed := self._find_fixed(numbers, tensor, slot):
            self._totals.add_fixed(fixed)
        else:
            for number in numbers:
                self._totals.add(self._lay_item(number, tensor, slot))
        self._numbers += numbers

    def queue_lasting(self, tensors: dict[int, Tensor], arrived: DeviceEvent, slot: int = 0) -> None:
        """Queue the checksums of items that stay in their memory, on a separate stream after `arrived`."""
        if tensors:
            with self._stream as stream:
                stream.follow_mark(arrived)
                self.queue(tensors, tensors.__getitem__, slot)

    def all(self) -> Tensor | None:
        """Return the checksums, int64 [n] on the current stream, in the order of `queue`; None if nothing was queued.

        Do not call it in a refit that used `queue_lasting`.
        """
        return self._totals.all() if self._numbers else None

    def values(self, queued_on: DeviceStream | None = None) -> dict[int, int]:
        """Return item -> checksum. Call it after the last `queue` of a refit; the first call waits for the device.

        queued_on: stream on which `queue` was called; None if the device has finished that stream's work.
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
        """Return the tensors if one kernel sums them, None if they are summed one by one."""
        if slot is None or self._device.type != "cuda" or len(numbers) < _TOGETHER:
            return None
        key = (slot, tuple(numbers))
        if key not in self._fixed:
            self._fixed[key] = FixedTensors([tensor(number) for number in numbers])
        return self._fixed[key] if self._fixed[key].table else None

    def _lay_item(self, number: int, tensor: Callable[[int], Tensor], slot: int | None) -> Tensor:
        # Cached if `lay` makes no copy, because calling `lay` takes the host as long as queuing the checksum.
        if slot is not None and (number, slot) in self._laid_items:
            return self._laid_items[number, slot]
        item = tensor(number)
        laid = lay(item)
        if slot is not None and is_laid_out(item):
            self._laid_items[number, slot] = laid
        return laid


def _sum_tail(raw: Tensor) -> Tensor:
    """Return the weighted sum of the bytes after the last whole row, int64 []: words times FACTOR, bytes after the last
    word times FACTOR squared."""
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    last_bytes = raw[words.numel() * 8 :]
    return words.sum() * FACTOR + last_bytes.sum(dtype=torch.int64) * (FACTOR * FACTOR)


def _weight_rows(row_sums: list[Tensor]) -> Tensor:
    """Fold each tensor's row sums, multiply by the rows' factors and add up; return int64 [n], one total a tensor.

    row_sums: for each of n tensors, int64 [rows]. The totals are differences of one running sum, exact modulo 2^64, so
    that the number of operations does not grow with n.
    """
    rows = torch.cat(row_sums)
    counts = [len(tensor_rows) for tensor_rows in row_sums]
    rows ^= rows >> 32 & 0xFFFFFFFF
    factors = torch.arange(max(counts)) * 2 + 3
    rows *= torch.cat([factors[:count] for count in counts])
    running = rows.new_zeros(len(rows) + 1)
    torch.cumsum(rows, 0, out=running[1:])
    return running[[*accumulate(counts, initial=0)]].diff()
