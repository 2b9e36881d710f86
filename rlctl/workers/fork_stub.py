"""Stub that Ray starts in place of a worker: a server forks the real worker (fork_server.py).

The stub passes signals on to the worker, and ends with the worker's exit status. Without a server it becomes the worker
itself. The program imports only the standard library. Usage: `python fork_stub.py SERVER PLACES NUMBER,... PROGRAM
ARGUMENT...`. SERVER is the folder of the server, PLACES that of one Ray's stubs. The first stage forks as many workers
of this Ray as the first number says, then the next one as many as the second says; the last stage forks all others.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time

# Seconds between two attempts to connect while the server imports.
_RETRY_S = 0.02
# Options of Ray's set-up program, which the stub replaces. The worker does not know them.
_SETUP_OPTIONS = ("--language=", "--serialized-runtime-env-context=")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def lives(pid_file: str) -> bool:
    """Return True if the process that a file names runs. A zombie does not."""
    try:
        with open(pid_file) as file:
            pid = file.read()
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _connect(path: str) -> "socket.socket | None":
    """Connect to a stage of the server, and wait while it still imports. Return None if its process has ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while lives(f"{path}.pid"):
        with contextlib.suppress(OSError):
            connection.connect(path)
            return connection
        time.sleep(_RETRY_S)
    return None


def _take_place(places: str, numbers: "list[int]") -> int:
    """Return the stage from which to fork the worker: the first one with a free place for a worker of this Ray."""
    for stage, number in enumerate(numbers):
        for place in range(number):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(os.path.join(places, f"place-{stage}-{place}"), os.O_CREAT | os.O_EXCL))
                return stage
    return len(numbers)


def _ask_for_worker(path: str, arguments: "list[str]") -> "tuple[socket.socket, int] | None":
    """Have a stage of the server fork the worker. Return the connection and the worker's process id; None if no server
    forks it."""
    connection = _connect(path)
    if connection is None:
        return None
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    ignored = [int(number) for number in _FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    start = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": blocked,
        "ignored": ignored,
    }
    message = json.dumps(start).encode()
    # A signal that comes before the worker's process id is known waits until it can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(message)
        answer = connection.recv(64)
    except OSError:
        return None
    return (connection, int(answer)) if answer else None


def main(path: str, arguments: "list[str]") -> None:
    """Become a stub of a forked worker, or the worker itself. path: of the stage's socket. arguments: of Python."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    worker = _ask_for_worker(path, arguments)
    if worker is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execv(sys.executable, [sys.executable, *arguments])
    connection, pid = worker

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    status = connection.recv(64)
    os._exit(int(status) if status else 1)


if __name__ == "__main__":
    _server, _places, _numbers, *_arguments = sys.argv[1:]
    _stage = _take_place(_places, [int(number) for number in _numbers.split(",") if number])
    main(
        os.path.join(_server, f"stage-{_stage}"),
        [argument for argument in _arguments if not argument.startswith(_SETUP_OPTIONS)],
    )
