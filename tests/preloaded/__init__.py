"""Server of the suite: it makes the imports of workers once, and forks the workers of all runs of all tests.

A run of a user starts such a server by itself (rlctl/launch/worker_imports.py). In the suite these imports would be
half of the time. Tests of starts and ends use the fixture `ordinary_workers`: their runs start servers as a user's do.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from rlctl.launch.worker_imports import SHARED_SERVER, engine_stage, trainer_stage
from rlctl.workers.preloading import ForkServer, start_server

# Name of the pipe in the server's folder that the suite's first process keeps open. The server ends with this process.
PIPE = "suite"


def prepare() -> None:
    """Make the server's folder, in the suite's first process alone.

    With a CUDA device all workers are ordinary ones: a process that uses such a device must not fork.
    """
    if SHARED_SERVER in os.environ or Path("/dev/nvidiactl").exists():
        return
    os.environ[SHARED_SERVER] = tempfile.mkdtemp(prefix="rlp-")
    pipe = Path(os.environ[SHARED_SERVER]) / PIPE
    os.mkfifo(pipe)
    os.open(pipe, os.O_RDWR)


def start() -> None:
    """Start the server, if no process of the suite has yet. Workers wait until it answers."""
    if SHARED_SERVER not in os.environ:
        return
    folder = Path(os.environ[SHARED_SERVER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "stage-0.pid").exists():
            return
        stdin = os.open(folder / PIPE, os.O_RDONLY)
        start_server([trainer_stage("fsdp"), engine_stage("vllm")], folder, folder / "imports.log", stdin)
        os.close(stdin)


def describe_lost_stages() -> list[str]:
    """Return a line for each process of the server that has ended before the suite: later workers started as usual."""
    if SHARED_SERVER not in os.environ:
        return []
    folder = Path(os.environ[SHARED_SERVER])
    lost = ForkServer(folder).lost_stages()
    if not lost:
        return []
    log = (folder / "imports.log").read_text().strip()
    return [f"the server of workers has lost {name} before the suite ended: {log[-2000:]}" for name in lost]


def remove_folder() -> None:
    """Remove the server's folder, in the suite's first process alone."""
    if SHARED_SERVER in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ[SHARED_SERVER])
