"""Hook that each Python process of a test runs at its start. It turns a worker of Ray into a stub.

A server of the suite forks the real worker. The stub passes signals on to it and ends with its exit status.
"""

import os
import sys


def _place_of_worker() -> int:
    """Return the index of Ray's own program among the arguments; 0 if this process is no worker of Ray."""
    for place, argument in enumerate(sys.orig_argv[1:4], start=1):
        if argument.endswith("ray/_private/workers/default_worker.py"):
            return place
    return 0


def _connect(connection: object, path: str) -> bool:
    """Connect to the server, and wait while it still imports. Return False if there is no server."""
    import time

    server = f"{path}.pid"
    while os.path.exists(server):
        try:
            connection.connect(path)  # type: ignore[attr-defined]
            return True
        except OSError:
            time.sleep(0.05)
        with open(server) as file:
            if not os.path.exists(f"/proc/{file.read()}"):
                return False
    return False


def _become_stub(path: str, place: int) -> None:
    """Have the server fork the worker, and end as it ends. Signals to this process go to the worker.

    Returns if there is no server: the process goes on as an ordinary worker.
    """
    import contextlib
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not _connect(connection, path):
        return
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    ignored = [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
    start = {
        "arguments": sys.orig_argv[place:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": blocked,
        "ignored": ignored,
    }
    message = json.dumps(start).encode()
    socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(message)
    worker = int(connection.recv(64))

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if number not in ignored:
            signal.signal(number, forward)
    status = connection.recv(64)
    os._exit(int(status) if status else 1)


_PLACE = _place_of_worker()
if _PLACE and "RLCTL_TEST_PRELOADED" in os.environ:
    # Only engines on a CPU set this variable, so it tells engines from other workers.
    _KIND = "engine" if os.environ.get("TORCHDYNAMO_DISABLE") else "worker"
    _become_stub(os.path.join(os.environ["RLCTL_TEST_PRELOADED"], _KIND), _PLACE)
