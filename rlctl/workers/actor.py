"""`WorkerActor`, the only Ray actor class of rlctl: it hosts a plain worker object in a separate process.

The worker's methods run on threads of the actor. A trainer has one thread, so thread-locals such as the grad mode and
the CUDA device are the same in every call. Exceptions are returned as values with the worker's name and traceback, so
that an exception never looks like a dead process. The output of each process goes to a separate log file.
"""

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlctl.utils.ports import free_port
from rlctl.utils.process import fewer_collections
from rlctl.utils.user_code import format_trace, message_of
from rlctl.workers.compiled_graph import Answer, idle, pack_value, read_patiently, take_arguments
from rlctl.workers.errors import Failure
from rlctl.workers.shared_arguments import fetch_values

# Runs work on another thread, waits for it, and returns its answer.
Run = Callable[[Callable[[], Answer]], Answer]


class WorkerActor:
    """Host of one worker: builds it by `make()` in its process, then runs its methods.

    Every method that a `Pending` waits for returns an `Answer`.
    """

    def __init__(self, name: str, make: Callable[[], Any], env: dict[str, str], log: str | None, threads: int) -> None:
        os.environ.update(env)
        if log:
            _redirect_output(Path(log))
        self._name = name
        self._make = make
        self._wait_for_thread = _one_thread(name) if threads == 1 else _many_threads(name, threads)
        self._worker: Any = None
        self._graph_calls = 0

    def build(self) -> Answer:
        """Build the worker. This is a separate call, so that many workers start at the same time."""
        with fewer_collections():
            return self._run_on_thread(lambda: setattr(self, "_worker", self._make()))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run one method of the worker and return its answer. For the method name `idle`, do nothing."""
        if method == idle.__name__:
            return self._run_on_thread(lambda: None)
        return self._run_on_thread(lambda: getattr(self._worker, method)(*fetch_values(args), **kwargs))

    def graph_call(self, message: Any, rank: int) -> Any:
        """Run `call` with this rank's arguments from a message to all ranks.

        The message was packed by `pack_value`, and so is the answer.
        """
        self._graph_calls += 1
        method, args, kwargs = take_arguments(message, rank)
        return pack_value(self.call(method, args, kwargs))

    def graph_calls(self) -> int:
        """Return the number of calls that came through a compiled graph."""
        return self._graph_calls

    def read_patiently(self) -> bool:
        """Call `read_patiently` of compiled_graph.py in this process."""
        return read_patiently()

    def call_at_once(self, method: str, args: tuple[Any, ...]) -> None:
        """Run a short method at once, also while another method runs. The method must be thread-safe."""
        getattr(self._worker, method)(*args)

    def ask(self, method: str, wait_s: float) -> Answer:
        """Run a method that returns within `wait_s` seconds, also while another method runs. It must be thread-safe."""
        return self._answer_with(lambda: getattr(self._worker, method)(wait_s))

    def pid(self) -> Answer:
        """Return the process id at once, also while a method runs."""
        return None, os.getpid()

    def free_port(self, address: str) -> Answer:
        """Return a free port of an address of this node at once, also while a method runs."""
        return None, free_port(address)

    def _run_on_thread(self, work: Callable[[], Any]) -> Answer:
        return self._wait_for_thread(lambda: self._answer_with(work))

    def _answer_with(self, work: Callable[[], Any]) -> Answer:
        """Run `work` and return its answer. An exception of `work` becomes the answer's Failure."""
        try:
            return None, work()
        except BaseException as error:
            # SystemExit is caught too: if it ended the thread, the caller would wait without an answer.
            with contextlib.suppress(Exception):  # the disk of the log may be full
                traceback.print_exc()
            trace = format_trace(error, error.__traceback__)
            return Failure(self._name, type(error).__name__, message_of(error), trace), None


def _one_thread(name: str) -> Run:
    """Return a function that runs work on a new thread, one piece after the other.

    Passing the work to the thread takes 16 us; with a ThreadPoolExecutor of one thread it takes 26 us.
    """
    jobs: queue.SimpleQueue[tuple[Callable[[], Answer], queue.SimpleQueue[Answer]]] = queue.SimpleQueue()

    def keep_working() -> None:
        while True:
            work, answer = jobs.get()
            answer.put(work())

    def run(work: Callable[[], Answer]) -> Answer:
        answer: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        jobs.put((work, answer))
        return answer.get()

    threading.Thread(target=keep_working, name=name, daemon=True).start()
    return run


def _many_threads(name: str, threads: int) -> Run:
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    return lambda work: pool.submit(work).result()


def _redirect_output(log: Path) -> None:
    """Append all output of this process to its log file, also that of native code and of child processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # `kill -USR1 PID` writes every thread's stack into the log, to examine a process that seems to hang. A process that
    # does not hang may crash, because CPython reads frames while they change.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Ray replaces sys.stdout and sys.stderr in its workers: connect them to descriptors 1 and 2 again.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
