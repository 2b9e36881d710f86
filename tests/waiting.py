"""Waiting for a condition instead of a fixed time, so that no test depends on the machine's speed."""

import time
from collections.abc import Callable

# Longest wait in seconds, many times what a slow and busy machine needs. Only a failing test waits so long.
PATIENCE_S = 300.0


def until(
    is_true: Callable[[], object], message: Callable[[], object] | str = "it", within_s: float = PATIENCE_S
) -> None:
    """Wait until `is_true()`. message: the text of a failure, or a function that returns the text."""
    end = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end, f"not within {within_s:g} s: {message() if callable(message) else message}"
        time.sleep(0.02)
