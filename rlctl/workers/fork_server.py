"""Server that imports modules once, and forks Ray's worker processes from itself.

A worker imports torch, transformers and vLLM for 4 to 10 s of CPU before it does anything. The server imports them
while Ray starts. It has stages, each a process: the process of a stage is forked from that of the stage before, and
imports further modules. A stub says from which stage its worker is forked.

The server's command is `python fork_server.py FOLDER STAGES`. STAGES is a JSON list of stages (`ImportStage` of
preloading.py). The server ends, with its workers, once its stdin is closed: so it ends with the driver, however that
ends.

A connection to the socket `FOLDER/stage-N` brings a worker's start and its three standard files. The answer is the
worker's process id and, once the worker has ended, its exit status. If a stub (fork_stub.py) is killed, its connection
closes earlier. Its worker is killed too.
"""

import atexit
import ctypes
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
from pathlib import Path
from typing import Any

# Seconds between two checks for workers that have ended.
_LOOK_S = 0.05
# Option of Linux's `prctl`: the signal that this process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1


def import_modules(names: list[str]) -> None:
    """Import the modules. Ray stays out, because it reads a worker's environment variables at its import."""
    gc.disable()
    # `import ray` fails here. vLLM then skips its support of Ray, because rlctl does not use it.
    sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        for name in names:
            import_module(name)
    finally:
        del sys.modules["ray"]
    loaded = [name for name in sys.modules if name.partition(".")[0] == "ray"]
    if loaded:
        raise ImportError(f"{names} import {loaded}")
    gc.freeze()
    gc.enable()


def receive_start(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the start message of a worker (arguments, environment, folder) and its three standard files.

    Raises EOFError if the stub has ended.
    """
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    size = int.from_bytes(length, "little")
    message = b""
    while len(message) < size or not length:
        part = connection.recv(size - len(message))
        if not part:
            raise EOFError
        message += part
    return json.loads(message), files


def run_worker(start: dict[str, Any], files: list[int]) -> None:
    """Become the worker. Does not return."""
    # The worker has no other way to notice that the server was killed.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
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
    paths += [path for path in sys.path if path not in paths]
    sys.path[:] = [path for path in paths if path]
    _renew_state()
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


def _renew_state() -> None:
    """Seed the random generators again, and set the number of torch's threads from the worker's environment."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS")
    if torch and threads:
        torch.set_num_threads(int(threads))


class StageProcess:
    """The process of one stage: it listens on its socket, and keeps a connection for each running worker."""

    def __init__(self, folder: Path, index: int) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / f"stage-{index}"
        self._listener.bind(f"{path}.new")
        self._listener.listen(64)
        os.rename(f"{path}.new", path)

    def serve(self) -> None:
        """Fork workers until stdin is closed. Then kill the workers that are left."""
        is_open = True
        while is_open:
            waiting: list[Any] = [0, self._listener, *self._connections.values()]
            ready, _, _ = select.select(waiting, [], [], _LOOK_S)
            if self._listener in ready:
                self._answer()
            self._end_workers_of_killed_stubs(ready)
            self._report_ended_workers()
            is_open = 0 not in ready
        for worker in self._connections:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        try:
            start, files = receive_start(connection)
        except (EOFError, OSError):
            connection.close()
            return
        self._fork(connection, start, files)

    def _fork(self, connection: socket.socket, start: dict[str, Any], files: list[int]) -> None:
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
        with suppress(OSError):
            connection.send(str(worker).encode())

    def _end_workers_of_killed_stubs(self, ready: list[Any]) -> None:
        """Kill the workers whose stub was killed. ready: readable connections, which are closed ones, because a stub
        sends nothing after its start."""
        for worker, connection in self._connections.items():
            if connection in ready:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)

    def _report_ended_workers(self) -> None:
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


def main(folder: Path, stages: list[dict[str, Any]]) -> None:
    """Import each stage's modules, and serve. The process of a stage forks that of the next one."""
    for index, stage in enumerate(stages):
        os.environ.update(stage["environment"])
        import_modules(stage["modules"])
        if index == len(stages) - 1:
            StageProcess(folder, index).serve()
            return
        next_process = os.fork()
        if next_process:
            (folder / f"stage-{index + 1}.pid").write_text(str(next_process))
            StageProcess(folder, index).serve()
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
