"""Waiting for a state, never for a time: a machine's speed is no part of a test."""

import time
from collections.abc import Callable

# Many times the need of a slow and busy machine: only a failing test waits to the end.
PATIENCE_S = 300.0


def until(
    is_true: Callable[[], object], message: Callable[[], object] | str = "it", within_s: float = PATIENCE_S
) -> None:
    """Wait until `is_true()`. message: the text of a failure, or a function that returns the text."""
    end = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end, f"not within {within_s:g} s: {message() if callable(message) else message}"
        time.sleep(0.02)
