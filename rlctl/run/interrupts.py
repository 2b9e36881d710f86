"""Ctrl-C, the SIGTERM of `rlctl runs stop` and of schedulers, and the SIGHUP of a closed terminal.

The first asks the run to end after its step, the second ends it at once. Before the first step there is nothing to
save: the first signal ends the start. A cluster command has no step: the first signal stops it, and no signal
interrupts its clearing up. A SIGHUP that is ignored, as below `nohup`, stays ignored.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlctl.config.errors import UserError

# Signal -> the signal in words, and the status of a run that it ends.
_MEANINGS = {
    signal.SIGINT: ("Ctrl-C", "interrupted"),
    signal.SIGTERM: ("asked to stop", "stopped"),
    signal.SIGHUP: ("the terminal was closed", "stopped"),
}


class Interrupts:
    """Handlers of the signals: the first sets `is_requested`, the second ends the process with exit code 130.

    A SIGHUP is never the second: the kernel and the shell each send one when a terminal closes.
    last_words: called by the second before the process ends, on the main thread, which may hold any lock.
    """

    def __init__(self, notify: Callable[[], None], last_words: Callable[[], None] = lambda: None) -> None:
        # True once the run is to end.
        self.is_requested = False
        self.by, self.status = _MEANINGS[signal.SIGINT]
        self._notify = notify
        self._last_words = last_words
        self._before: Mapping[signal.Signals, Any] = {}
        self._at_once = False

    def __enter__(self) -> "Interrupts":
        self._before = _set_handlers(self._handle, *_MEANINGS)
        return self

    def __exit__(self, *_: object) -> None:
        _put_back(self._before)

    @contextmanager
    def ends_block(self) -> Iterator[None]:
        """Have the first signal raise KeyboardInterrupt in the block, on the main thread: there is nothing to save."""
        self._at_once = True
        try:
            if self.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            if number == signal.SIGHUP:
                return
            try:
                self._last_words()
            finally:
                os._exit(130)
        self.by, self.status = _MEANINGS[signal.Signals(number)]
        self.is_requested = True
        # On a separate thread: the interrupted main thread may hold a lock that this waits for.
        threading.Thread(target=self._notify, name="interrupted").start()
        if self._at_once:
            # Raised once: the code that follows ends the parts of the run.
            self._at_once = False
            raise KeyboardInterrupt


class NotStopped(UserError):
    """A driver that was not told to stop. The message is one line with the remedy."""


def stop_driver(run: str, start: Mapping[str, Any]) -> None:
    """Ask a driver on this machine to stop. start: the run's event `run_started`.

    Raises NotStopped for a driver of another machine, one that the event does not name, and one that cannot be told.
    """
    if start.get("host") != socket.gethostname():
        where = start.get("host") or "no machine that is known"
        raise NotStopped(f"{run} is driven on {where}: stop it there, or press Ctrl-C")
    try:
        os.kill(int(start["pid"]), signal.SIGTERM)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise NotStopped(f"the events of {run} do not name its driver: stop it where it runs, with Ctrl-C") from None
    except OSError as error:
        failure = NotStopped(f"process {start['pid']}, which drives {run}, cannot be told: {error.strerror}")
        failure.exit_code = 1
        raise failure from None


@contextmanager
def stop_signals() -> Iterator[None]:
    """Treat `kill` and a closed terminal as Ctrl-C, so that the block stops its processes."""
    with _handle_by(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore signals while the block clears up: it takes seconds, and nobody else would stop the rest."""
    with _handle_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            yield
        finally:
            sys.stdout.flush()


@contextmanager
def _handle_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before = _set_handlers(handler, *numbers)
    try:
        yield
    finally:
        _put_back(before)


def _set_handlers(handler: Any, *numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Set the handler of the signals, and return the handlers before. A SIGHUP that is ignored is left out."""
    handlers_before = {}
    for number in numbers:
        is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_ignored:
            handlers_before[number] = signal.signal(number, handler)
    return handlers_before


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
