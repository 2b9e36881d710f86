"""Counters in mapped memory that both ends of a refit on one host share, and waits with a deadline."""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlctl.refit.protocol import PeerLost

# A wait reads a counter and sleeps, again and again. A sleep lasts this share of the time waited, within these limits.
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_SLEEP_SHARE = 1e-4
# Linux adds 50 us to every sleep of a thread, unless the thread asks for less with this option. A chunk needs up to
# four sleeps. One read and sleep took 125 us, and 43 us with the option.
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class SharedCounters:
    """int64 words in a file that several processes map. Writing one word is atomic."""

    def __init__(self, path: Path, count: int, create: bool) -> None:
        """Map the file. create: make it first, with zeros, readable only by its user, and atomically by a rename."""
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
    """Time at which one end stops waiting for the other."""

    def __init__(self, seconds: float) -> None:
        """Begin to count. This also makes later sleeps of the calling thread precise."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        if _LIBC:
            _LIBC.prctl(_PR_SET_TIMERSLACK, 1)

    def check(self, message: Callable[[], str]) -> None:
        """Sleep for a moment. After the deadline raise PeerLost with the text of `message`, in which {} is replaced by
        the time waited."""
        remaining = self._end - time.monotonic()
        if remaining < 0:
            raise PeerLost(message().replace("{}", f"{self._seconds:g} s"))
        waited = self._seconds - remaining
        time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, waited * _SLEEP_SHARE)))


def digest_word(digest: str) -> int:
    """Return a plan's digest as one int64 word."""
    return int(digest[:15], 16)
