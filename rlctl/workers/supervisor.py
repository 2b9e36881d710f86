"""Supervisors of a process that runs the user's code. When the process ends, they end all of its descendants.

A supervisor adopts all orphans among its descendants, also those in a new session, and ends them when its child ends.
There are two supervisors, one below the other, since the user's code may kill one supervisor by a signal:

    outer -> inner -> worker

The outer supervisor ends all descendants when its standard input closes: at the parent's request, or because the parent
is gone. It adopts the orphans of a killed inner supervisor. The inner supervisor ends all of its descendants when the
outer one is gone (its pipe closes). Each byte on the standard input sends SIGTERM to the worker's process group.
Supervisors cannot end children of other programs, such as a container that a daemon starts. The first argument of the
program is the connection's descriptor, see guarded_process.py.

`python supervisor.py FD COMMAND...` supervises any program; its error number goes to FD if it cannot be started.
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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Ending all descendants takes at most this long, because the user's code might fork as fast as it is killed.
_ENDING_S = 5.0
# Byte to the outer supervisor that asks the worker to end.
_ASK = b"."


def run_guarded(work: Callable[[socket.socket], None]) -> NoReturn:
    """Fork the process that runs `work` on the connection, and supervise it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    # Pipe from the outer to the inner supervisor. It closes when the outer one is gone.
    pipe_reader, pipe_writer = os.pipe()
    inner = _fork_child()
    if inner:
        # The outer supervisor: it passes each request of its standard input on to the inner one. It does not return.
        os.close(pipe_reader)
        _supervise(inner, requests=0, connection=connection, ask=lambda: os.write(pipe_writer, _ASK))
    os.close(pipe_writer)
    # In a new session, so that a signal to the outer supervisor's process group does not reach this process.
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    supervisor = os.getpid()
    worker = _fork_child()
    if worker:
        # The inner supervisor, which does not return either.
        _supervise(worker, requests=pipe_reader, connection=connection, ask=lambda: os.killpg(worker, signal.SIGTERM))
    # The worker. The kernel kills it when the inner supervisor ends.
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        # The supervisor ended before the kernel was told.
        os._exit(1)
    os.close(pipe_reader)
    _stay_silent_when_forked(connection)
    # The worker may end by SIGKILL, which would lose text in a buffer: write it line by line.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    work(connection)
    os._exit(0)


def _fork_child() -> int:
    """Fork. This process will adopt orphans among the child's descendants. Return the child's pid; in the child, 0."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return os.fork()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stay_silent_when_forked(connection: socket.socket) -> None:
    """Let only this process, the worker, write to `connection`: replace it by /dev/null in each process it forks."""
    descriptor = connection.fileno()

    def silence() -> None:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), descriptor, inheritable=False)

    os.register_at_fork(after_in_child=silence)


def _supervise(child: int, requests: int, connection: socket.socket, ask: Callable[[], object]) -> NoReturn:
    """Wait until `child` ends or the descriptor `requests` closes; end all descendants; exit with a status for `child`.

    The exit status is the child's, or 128 plus the signal that ended the child, as in shells. ask: asks the worker to
    end; called for each byte on `requests`.
    """
    connection.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ignored here, because the parent finishes its step first. The worker and its children keep the defaults.
        signal.signal(number, signal.SIG_IGN)
    status = _wait_for_child(child, requests, ask)
    _end_family(child)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    # Exit without the interpreter's exit handlers: they take a while, and nothing is left to clean up.
    os._exit(code if code >= 0 else 128 - code)


def _wait_for_child(child: int, requests: int, ask: Callable[[], object]) -> int | None:
    """Return the exit status of `child`; None if the descriptor `requests` closed first."""
    # Python writes a byte into this pipe when a child ends (SIGCHLD), which wakes `poll` below.
    wake_reader, wake_writer = os.pipe()
    for descriptor in (wake_reader, wake_writer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(requests, select.POLLIN | select.POLLHUP)
    poll.register(wake_reader, select.POLLIN)
    status = _reap(child)
    while status is None:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if requests in ready:
            if not os.read(requests, 1):
                # End of file: the process that asks has closed its end, or is gone.
                break
            with contextlib.suppress(OSError):  # the worker may have ended meanwhile
                ask()
        with contextlib.suppress(BlockingIOError):
            os.read(wake_reader, 4096)
        status = _reap(child)
    return status


def _reap(child: int) -> int | None:
    """Reap every child that has ended; return the exit status of `child`, None if it has not ended."""
    status = None
    while True:
        try:
            ended_pid, ended_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended_pid == 0:
            return status
        if ended_pid == child:
            status = ended_status


def _end_family(child: int) -> None:
    """Kill the process group of `child`, then all descendants of this process, until there are none."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    # Killing a process makes its children this process's children, which the next iteration kills.
    end = time.monotonic() + _ENDING_S
    while time.monotonic() < end:
        _reap(child)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # No child is left, and so no descendant: orphans would be children of this process.
            return
        import psutil

        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


def _become_command(connection: socket.socket) -> None:
    """Replace this process by the program in the further arguments. Send the error number if that fails."""
    # Python ignores these two signals, and the program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        connection.send(str(error.errno).encode())


if __name__ == "__main__":
    run_guarded(_become_command)
