"""Checksums of what one end sends or gets, taken while other chunks are under way."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from rlctl.refit.checksum import checksums
from rlctl.refit.lanes import Lane, Mark


class Sums:
    """Of one refit after the other: queue them with `here` and `beside`, then ask for all."""

    def __init__(self, device: torch.device) -> None:
        self._lane = Lane(device)
        self._taken: list[tuple[list[int], Tensor]] = []

    def start(self) -> None:
        """A new refit begins."""
        self._taken = []

    def here(self, numbers: Collection[int], tensor: Callable[[int], Tensor]) -> None:
        """Of items in memory that is soon used again: on the current stream, before it goes on. tensor: of a number."""
        if numbers:
            self._taken.append(([*numbers], checksums(map(tensor, numbers))))

    def beside(self, tensors: dict[int, Tensor], arrived: Mark) -> None:
        """Of items that stay where they lie once `arrived` is reached."""
        if tensors:
            with self._lane as lane:
                lane.after(arrived)
                self.here(tensors, tensors.__getitem__)

    def all(self) -> Tensor | None:
        """int64 [n], in the order of their queuing, on the current stream; for a user of `here` alone."""
        return torch.cat([sums for _, sums in self._taken]) if self._taken else None

    def values(self) -> dict[int, int]:
        """Every item's; what was queued must have been reached, except `beside`."""
        self._lane.wait()
        numbers = [n for taken, _ in self._taken for n in taken]
        sums = self.all()
        return dict(zip(numbers, sums.tolist())) if sums is not None else {}
