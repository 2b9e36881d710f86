"""Waiting for a state, never for a time: a machine's speed is no part of a test."""

import time
from collections.abc import Callable

# Many times the need of a slow and busy machine: only a failing test waits to the end.
PATIENCE_S = 300.0


def until(seen: Callable[[], object], what: Callable[[], object] | str = "it", within_s: float = PATIENCE_S) -> None:
    """Wait until `seen()`. what: the text of a failure, or a function of it, called only then."""
    end = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
