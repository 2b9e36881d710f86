"""Ctrl-C, or SIGTERM, which is how `rlctl runs stop` and schedulers ask: the first asks the run to end after its step,
the second ends it at once. A cluster command has no step: its first signal stops it, and its clearing up none."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, SIGINT and SIGTERM set `asked` once; a second one ends the process with exit code 130.

    by: which it was, in words. status: what the run is called that ends by it.
    """

    def __init__(self, notify: Any) -> None:
        self.asked = False
        self.by = "Ctrl-C"
        self.status = "interrupted"
        self._notify = notify
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(130)
        if number == signal.SIGTERM:
            self.by, self.status = "asked to stop", "stopped"
        self.asked = True
        # Not here: the main thread may stand in the middle of what this waits for.
        threading.Thread(target=self._notify, name="interrupted").start()


@contextmanager
def stop_signals() -> Iterator[None]:
    """A terminal that closes and a `kill` are Ctrl-C: what was started is stopped again."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unhurried() -> Iterator[None]:
    """Clearing up is not interrupted: it takes seconds, and what it leaves nobody would stop."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, handler in before.items():
            signal.signal(number, handler)
