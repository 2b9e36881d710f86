"""What both ends of a refit within one host share: counters in mapped memory, and waits that end."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlctl.refit.messages import PeerLost

_POLL_S = 50e-6


class Words:
    """int64 words in a file that several processes map; a store of one word is seen whole or not at all."""

    def __init__(self, path: Path, count: int, create: bool) -> None:
        """create: the file appears by rename, all zeros, readable by its owner alone."""
        if create:
            partial = path.with_suffix(".partial")
            partial.write_bytes(bytes(8 * count))
            partial.chmod(0o600)
            os.replace(partial, path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * count)
        self.array: NDArray[np.int64] = np.frombuffer(self._map, np.int64)

    def close(self) -> None:
        self.array = np.zeros(0, np.int64)


class Deadline:
    """The end of one side's patience."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def check(self, message: Callable[[], str]) -> None:
        """Wait a moment; raises PeerLost when the time is over. `message`'s {} becomes the time waited."""
        if time.monotonic() > self._end:
            raise PeerLost(message().replace("{}", f"{self._seconds:g} s"))
        time.sleep(_POLL_S)


def digest_word(digest: str) -> int:
    """A plan's digest as one word."""
    return int(digest[:15], 16)
