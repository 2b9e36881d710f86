"""Checksums of what one end sends or gets, taken while other chunks are under way."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from rlctl.refit.checksum import Laid, Partial, finish, lay, lies_right, partial
from rlctl.refit.lanes import Lane, Mark


class Sums:
    """Of one refit after the other: queue them with `here` and `beside`, then ask for all.

    A chunk's checksums are begun with it and finished with those of all others: finished chunk by chunk they kept an
    engine's host busy for 45 of a refit's 48 ms (Qwen3-8B, 2 ranks to 2 engines), so that the wire waited for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._lane = Lane(device)
        self._laid: dict[tuple[int, int], Laid] = {}
        self.start()

    def start(self) -> None:
        """A new refit begins."""
        self._numbers: list[int] = []
        self._begun: list[Partial] = []
        self._sums: Tensor | None = None

    def here(self, numbers: Collection[int], tensor: Callable[[int], Tensor], slot: int | None = None) -> None:
        """Of items in memory that is soon used again: on the current stream, before it goes on. tensor: of a number.

        slot: the same memory at every refit for an item in a slot of this number; None: memory made anew.
        """
        for number in numbers:
            self._begun.append(partial(self._lay(number, tensor, slot)))
        self._numbers += numbers

    def beside(self, tensors: dict[int, Tensor], arrived: Mark) -> None:
        """Of items that stay where they lie, at every refit, once `arrived` is reached."""
        if tensors:
            with self._lane as lane:
                lane.after(arrived)
                self.here(tensors, tensors.__getitem__, slot=0)

    def all(self) -> Tensor | None:
        """int64 [n], in the order of their queuing, on the current stream; for a user of `here` alone."""
        return finish(self._begun) if self._begun else None

    def end(self, *after: Mark) -> Mark:
        """Nothing more is queued: finish, once the marks, behind which all of `here` lies, are reached."""
        with self._lane as lane:
            for mark in after:
                lane.after(mark)
            self._sums = self.all()
            return lane.mark()

    def values(self) -> dict[int, int]:
        """Every item's, after `end`; waits for them."""
        if self._sums is None:
            return {}
        with self._lane:
            return dict(zip(self._numbers, self._sums.tolist()))

    def close(self) -> None:
        """Keep no memory."""
        self._laid = {}
        self.start()

    def _lay(self, number: int, tensor: Callable[[int], Tensor], slot: int | None) -> Laid:
        # Laid out once where that makes no copy: it takes the host longer than to queue the sum itself.
        if slot is not None and (number, slot) in self._laid:
            return self._laid[number, slot]
        given = tensor(number)
        laid = lay(given)
        if slot is not None and lies_right(given):
            self._laid[number, slot] = laid
        return laid
