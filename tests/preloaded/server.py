"""Imports modules once, and forks a worker for each connection.

Its command is `python -m tests.preloaded.server SOCKET SUITE MODULE...`.

A connection brings the worker's start and its three standard files. It gets the worker's process id, and its exit
status once it has ended. A connection that closes before is a stub that was killed: its worker is killed too. The
server ends with the process SUITE.
"""

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

# Seconds between two checks for the end of the suite and of workers.
LOOK_S = 0.05


def import_modules(names: list[str]) -> None:
    """Import the modules. Ray is not imported, because it reads a worker's environment variables at its import."""
    gc.disable()
    # This makes `import ray` fail, so that vLLM skips its Ray support, which rlctl does not use.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in names:
        import_module(name)
    del sys.modules["ray"]
    loaded = [name for name in sys.modules if name.partition(".")[0] == "ray"]
    assert not loaded, loaded
    gc.freeze()
    gc.enable()


def receive_start(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the start message of a worker (arguments, environment, folder) and its three standard file descriptors."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    size = int.from_bytes(length, "little")
    message = b""
    while len(message) < size:
        message += connection.recv(size - len(message))
    return json.loads(message), files


def run_worker(start: dict[str, Any], files: list[int]) -> None:
    """Become the worker. Does not return."""
    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    for number in start["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked"])
    program = start["arguments"][0]
    sys.argv[:] = start["arguments"]
    sys.orig_argv[:] = [sys.executable, *start["arguments"]]
    paths = [os.path.dirname(program), *start["environment"].get("PYTHONPATH", "").split(os.pathsep)]
    known = set(paths)
    sys.path[:] = [*filter(None, paths), *(path for path in sys.path if path not in known and path)]
    renew_state()
    status: object = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status if isinstance(status, int) else int(status is not None))


def renew_state() -> None:
    """Seed the random generators again, and set the number of threads from the worker's environment."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))


class Server:
    """Listens on the socket, and keeps a connection for each running worker."""

    def __init__(self, path: str, suite: int) -> None:
        self._suite = suite
        self._connections: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{path}.new")
        self._listener.listen(64)
        os.rename(f"{path}.new", path)

    def run(self) -> None:
        """Serve until the suite has ended. Then kill the workers that are left."""
        while os.path.exists(f"/proc/{self._suite}"):
            waiting = [self._listener, *self._connections.values()]
            ready, _, _ = select.select(waiting, [], [], LOOK_S)
            if self._listener in ready:
                self._fork()
            self._end_workers_of_killed_stubs(ready)
            self._tell_of_ended_workers()
        for worker in self._connections:
            os.kill(worker, signal.SIGKILL)

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        start, files = receive_start(connection)
        worker = os.fork()
        if worker == 0:
            self._listener.close()
            connection.close()
            for other in self._connections.values():
                other.close()
            run_worker(start, files)
        for file in files:
            os.close(file)
        self._connections[worker] = connection
        connection.send(str(worker).encode())

    def _end_workers_of_killed_stubs(self, ready: list[socket.socket]) -> None:
        """Kill the workers whose stub was killed. ready: readable connections, which are closed ones, because a stub
        sends nothing after its start."""
        for worker, connection in self._connections.items():
            if connection in ready:
                os.kill(worker, signal.SIGKILL)

    def _tell_of_ended_workers(self) -> None:
        for worker in list(self._connections):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if not ended:
                continue
            code = os.waitstatus_to_exitcode(status)
            connection = self._connections.pop(worker)
            # The stub may be gone. A death by a signal is reported as 128 + signal, as by a shell, because the stub
            # cannot always die by the same signal.
            with suppress(OSError):
                connection.send(str(code if code >= 0 else 128 - code).encode())
            connection.close()


if __name__ == "__main__":
    import_modules(sys.argv[3:])
    Server(sys.argv[1], int(sys.argv[2])).run()
