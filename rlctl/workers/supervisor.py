"""The supervisor of a guarded process, which runs the user's code: whatever that starts ends with it.

The supervisor adopts whatever its descendants leave behind, also what has a session of its own, and ends all of it when
the worker ends, when the parent asks for it, and when the parent is gone (its standard input closes). A child of
another program, such as a container that a daemon starts, is out of its reach.
The first argument of the program is the connection's descriptor, see guarded.py.
"""

import contextlib
import ctypes
import io
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# For a family that forks as fast as it is killed.
_ENDING_S = 5.0


def run_guarded(work: Callable[[socket.socket], None]) -> NoReturn:
    """Fork the process that runs `work` on the connection, and supervise it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    worker = os.fork()
    if not worker:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _stay_silent_when_forked(connection)
        # It ends by SIGKILL: what was printed into a buffer until then would be lost.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        work(connection)
        os._exit(0)
    connection.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent finishes its step. The worker keeps the defaults, which whatever it starts inherits.
        signal.signal(number, signal.SIG_IGN)
    code = _supervise(worker)
    # Nothing is left to be tidied up, and exit handlers of the interpreter take a while.
    os._exit(code)


def _stay_silent_when_forked(connection: socket.socket) -> None:
    """Take the connection from every process that the user's code forks."""
    number = connection.fileno()

    def silence() -> None:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), number, inheritable=False)

    os.register_at_fork(after_in_child=silence)


def _supervise(worker: int) -> int:
    """Wait until the worker ends or the parent asks for its end, and end the family.

    Returns the worker's exit code as shells report it.
    """
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(woken, select.POLLIN)
    status = _reap(worker)
    while status is None:
        ready = [number for number, _ in poll.poll()]
        if 0 in ready and not os.read(0, 1):
            break
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        status = _reap(worker)
    _end_family(worker)
    if status is None:
        return 0
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _reap(worker: int) -> int | None:
    """Take the exit status of every child that has ended; return the worker's if it is among them."""
    status = None
    while True:
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == 0:
            return status
        if ended == worker:
            status = how


def _end_family(worker: int) -> None:
    import psutil

    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    # An orphan comes to this process as soon as its parent is gone, and so into the next round.
    end = time.monotonic() + _ENDING_S
    while time.monotonic() < end:
        _reap(worker)
        family = psutil.Process().children(recursive=True)
        if not family:
            return
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)
