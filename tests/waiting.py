"""Waiting for a state, never for a time: how long a machine takes is no part of what a test says."""

import time
from collections.abc import Callable

# What anything takes on a slow and busy machine, many times over: only a test that fails waits so long.
PATIENCE_S = 300.0


def until(seen: Callable[[], object], what: Callable[[], object] | str = "it", within_s: float = PATIENCE_S) -> None:
    """Wait until `seen()`. what: what the test says if it does not come, found out then if it is a function."""
    end = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
