"""Handling of signals: Ctrl-C, SIGTERM (from `rlctl runs stop` and schedulers), SIGHUP (from a closed terminal).

The first signal asks the run to end after its step; the second signal ends the run at once. Before the first step there
is nothing to save, so the first signal ends the start. A cluster command has no steps: the first signal stops it, and
no signal interrupts its cleanup. A SIGHUP that is ignored, as under `nohup`, stays ignored.
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

# Signal -> (text that names the signal, status of a run ended by the signal).
_MEANINGS = {
    signal.SIGINT: ("Ctrl-C", "interrupted"),
    signal.SIGTERM: ("asked to stop", "stopped"),
    signal.SIGHUP: ("the terminal was closed", "stopped"),
}


class Interrupts:
    """Signal handlers: the first signal sets `is_requested`, the second ends the process with exit code 130.

    A SIGHUP does not count as the second signal, because kernel and shell both send one when a terminal closes. notify:
    called after the first signal, on a separate thread. last_words: called after the second signal, before the process
    ends, on the main thread. It must not use the run's locks, because the main thread may have them already.
    """

    def __init__(self, notify: Callable[[], None], last_words: Callable[[], None] = lambda: None) -> None:
        # True after the first signal: the run must end after its step.
        self.is_requested = False
        self.by, self.status = _MEANINGS[signal.SIGINT]
        self._notify = notify
        self._last_words = last_words
        self._before: Mapping[signal.Signals, Any] = {}
        # True within `ends_block`.
        self._ends_block = False

    def __enter__(self) -> "Interrupts":
        self._before = _set_handlers(self._handle, *_MEANINGS)
        return self

    def __exit__(self, *_: object) -> None:
        _put_back(self._before)

    @contextmanager
    def ends_block(self) -> Iterator[None]:
        """Within the block, make the first signal raise KeyboardInterrupt on the main thread. This is for code before
        the first step, when there is nothing to save."""
        self._ends_block = True
        try:
            if self.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._ends_block = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal, on the main thread."""
        if self.is_requested:
            if number == signal.SIGHUP:
                return
            try:
                self._last_words()
            finally:
                os._exit(130)
        self.by, self.status = _MEANINGS[signal.Signals(number)]
        self.is_requested = True
        # On a separate thread, because `notify` may need a lock that the interrupted main thread holds.
        threading.Thread(target=self._notify, name="interrupted").start()
        if self._ends_block:
            # Raise it only once, because the cleanup that follows must not be interrupted.
            self._ends_block = False
            raise KeyboardInterrupt


class NotStopped(UserError):
    """The driver of a run could not be asked to stop. The message is one line with the remedy."""


def stop_driver(run: str, start: Mapping[str, Any]) -> None:
    """Ask a driver on this machine to stop. start: the run's event `run_started`.

    Raises NotStopped if the driver runs on another machine, if the event does not name it, or if signalling it fails.
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
    """Ignore signals within the block. It is for a cleanup that takes seconds: if a signal ended it, the parts that
    are still running would not be stopped."""
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
    """Set the handler of the signals; return the previous handlers. Leave out a SIGHUP that is ignored."""
    handlers_before = {}
    for number in numbers:
        is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_ignored:
            handlers_before[number] = signal.signal(number, handler)
    return handlers_before


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
