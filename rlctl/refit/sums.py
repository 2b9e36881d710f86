"""Checksums of what a receiver got, taken on a lane of their own while later chunks still arrive."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlctl.refit.checksum import checksums
from rlctl.refit.lanes import Lane, Mark
from rlctl.refit.sink import Sink


class Sums:
    """Of one refit after the other: queue them with `here` and `beside`, then ask for `values`."""

    def __init__(self, device: torch.device) -> None:
        self._lane = Lane(device)
        self._taken: list[tuple[list[int], Tensor]] = []

    def here(self, numbers: list[int], data: Callable[[int], Tensor]) -> None:
        """Of items in memory that is soon used again: on the current stream, before it goes on."""
        if numbers:
            self._taken.append((numbers, checksums([data(n) for n in numbers])))

    def beside(self, numbers: list[int], sink: Sink, arrived: Mark) -> None:
        """Of items that lie where they belong once `arrived` is reached."""
        if numbers:
            with self._lane as lane:
                lane.after(arrived)
                self._taken.append((numbers, checksums([_target(sink, n) for n in numbers])))

    def values(self) -> dict[int, int]:
        """Of every item queued since the last call; waits for them."""
        self._lane.wait()
        found = {n: value for numbers, sums in self._taken for n, value in zip(numbers, sums.tolist())}
        self._taken = []
        return found


def _target(sink: Sink, number: int) -> Tensor:
    target = sink.target(number)
    assert target is not None, "an item that lies where it belongs has a target"
    return target
