"""Checksums of what one end sends or gets, taken while other chunks are under way."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from rlctl.refit.checksum import ChecksumTable, lay, lies_right
from rlctl.utils.device_stream import DeviceEvent, DeviceStream


class StreamingChecksums:
    """Of one refit after the other: queue them with `here` and `beside`, then ask for all."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lane = device, DeviceStream(device)
        self._laid: dict[tuple[int, int], Tensor] = {}
        self.start(0)

    def start(self, count: int) -> None:
        """A new refit begins, of which at most `count` items are asked for."""
        self._numbers: list[int] = []
        with self._lane as lane:
            self._totals = ChecksumTable(count, self._device)
            self._begun = lane.mark()

    def here(self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None = None) -> None:
        """Of items in memory that is soon used again: on the current stream, before it goes on. tensor: of a number.

        slot: the same memory at every refit for an item in a slot of this number; None: memory made anew.
        """
        if numbers:
            self._begun.lead()
        for number in numbers:
            self._totals.add(self._lay(number, tensor, slot))
        self._numbers += numbers

    def beside(self, tensors: dict[int, Tensor], arrived: DeviceEvent) -> None:
        """Of items that stay where they lie, at every refit, once `arrived` is reached."""
        if tensors:
            with self._lane as lane:
                lane.after(arrived)
                self.here(tensors, tensors.__getitem__, slot=0)

    def all(self) -> Tensor | None:
        """int64 [n], in the order of their queuing, on the current stream; for a user of `here` alone."""
        return self._totals.all() if self._numbers else None

    def end(self, *after: DeviceEvent) -> None:
        """Nothing more is queued; all of `here` lies behind the marks."""
        with self._lane as lane:
            for mark in after:
                lane.after(mark)

    def values(self) -> dict[int, int]:
        """Every item's, after `end`; waits for them."""
        if not self._numbers:
            return {}
        with self._lane:
            return dict(zip(self._numbers, self._totals.all().tolist()))

    def close(self) -> None:
        """Keep no memory."""
        self._laid = {}
        self.start(0)

    def _lay(self, number: int, tensor: Callable[[int], Tensor], slot: int | None) -> Tensor:
        # Laid out once where that makes no copy: it takes the host as long as to queue the sum itself.
        if slot is not None and (number, slot) in self._laid:
            return self._laid[number, slot]
        given = tensor(number)
        laid = lay(given)
        if slot is not None and lies_right(given):
            self._laid[number, slot] = laid
        return laid
