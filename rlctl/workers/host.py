"""The one actor class: hosts a plain worker object in a process of its own.

Worker methods run on threads that the host owns (one for trainers, so that thread-locals such as the grad mode
and the CUDA device agree in every call). Errors travel as values with the worker's name and traceback, so that
a raised exception never looks like a dead process. Output of the process goes to a log file of its own.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlctl.workers.errors import Failure
from rlctl.workers.graph import NOTHING, Answer, Message, read_patiently, take


class Host:
    """Runs `make()` in its process, then the methods of what it returned."""

    def __init__(self, name: str, make: Callable[[], Any], env: dict[str, str], log: str | None, threads: int) -> None:
        os.environ.update(env)
        if log:
            _redirect_output(Path(log))
        self._name = name
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._make = make
        self._worker: Any = None

    def build(self) -> Failure | None:
        """Construct the worker; a separate call, so that many workers start at the same time."""
        return self._threads.submit(self._guarded, self._construct).result()[0]

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Failure | None, Any]:
        """The failure or the result of one method of the worker; None of NOTHING."""
        return self._threads.submit(self._guarded, lambda: self._do(method, args, kwargs)).result()

    def graph_call(self, message: Message, rank: int) -> Answer:
        """The same as `call`, with a message that all ranks share."""
        return self.call(*take(message, rank))

    def read_patiently(self) -> bool:
        """See `graph.read_patiently`."""
        return read_patiently()

    def aside(self, method: str, args: tuple[Any, ...]) -> None:
        """Run a short method at once, beside the one that may be running: it must be made for that."""
        getattr(self._worker, method)(*args)

    def pid(self) -> int:
        """Answers at once, also while a method runs."""
        return os.getpid()

    def _do(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if method == NOTHING else getattr(self._worker, method)(*args, **kwargs)

    def _construct(self) -> None:
        self._worker = self._make()

    def _guarded(self, work: Callable[[], Any]) -> tuple[Failure | None, Any]:
        try:
            return None, work()
        except Exception as error:
            with contextlib.suppress(OSError):  # the log may stand on the disk that is full
                traceback.print_exc()
            return Failure(self._name, type(error).__name__, str(error), traceback.format_exc()), None


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # `kill -USR1 PID` writes what every thread is doing into the log: for a process that seems to hang.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Ray gives its workers streams of their own: bring Python's back to the two descriptors.
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1, closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
