"""Which signals interrupt a cluster command, and when none may."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """A terminal that closes and a `kill` are Ctrl-C: what was started is stopped again."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
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
