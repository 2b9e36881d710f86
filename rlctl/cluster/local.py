"""Ray on this machine, private to one run: it starts with the driver and is gone when the driver is.

Tokens are on, nothing of the dashboard listens, and Ray's own chatter goes to the run's log folder.
"""

import functools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlctl.cluster.ray_session import ray_session
from rlctl.telemetry.cores import usable_cores
from rlctl.workers.reaper import Reaper

_OBJECT_STORE_BYTES = 1 << 30
# Ray gives its own node 30 s, a constant of its code, which a machine that is busy for a moment overruns.
_ATTEMPTS = 2
# A Unix socket's path has at most 107 bytes; Ray's own part of it, with the name of the folder, takes this many.
_SOCKET_BYTES, _RAYS_BYTES = 107, 82
_TOO_SLOW = "timed out during startup"


@contextmanager
def local_ray(logs: Path) -> Iterator[Reaper]:
    """A Ray of our own for the time of the block; yields the reaper that watches over its folders."""
    reaper = Reaper()
    try:
        with reaper.folder("rlctl-token-") as folder:
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token(folder))
            with _started(reaper, logs):
                yield reaper
    finally:
        reaper.close()


def _started(reaper: Reaper, logs: Path) -> ExitStack:
    """Ray is up until this is left. What an attempt that was too slow has started is gone before the next; the token
    stays, which Ray reads once a process."""
    for attempt in range(1, _ATTEMPTS + 1):
        with ExitStack() as stack:
            try:
                stack.enter_context(_ray_in(stack.enter_context(reaper.folder("rlctl-", _root())), logs))
                return stack.pop_all()
            except Exception as error:
                if _TOO_SLOW not in str(error) or attempt == _ATTEMPTS:
                    raise
    raise AssertionError("unreachable")


def _root() -> str:
    """Where Ray's folder stands: the temporary folder, unless its path is too long for the sockets in it."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _SOCKET_BYTES - _RAYS_BYTES else "/tmp"


@contextmanager
def _ray_in(folder: Path, logs: Path) -> Iterator[None]:
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else _OBJECT_STORE_BYTES
    store = min(_OBJECT_STORE_BYTES, shm // 2)
    session = ray_session(
        logs, include_dashboard=False, num_cpus=usable_cores(), object_store_memory=store, _temp_dir=str(folder)
    )
    with ExitStack() as stack:
        with _temporary_files_in(folder):
            stack.enter_context(session)
        yield


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    # Ray's processes inherit it, so that what engines leave in the temporary folder goes with ours.
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _token(folder: Path) -> Path:
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(_secret())
    return path


@functools.cache
def _secret() -> str:
    # Ray reads it once a process: a second Ray of this process must have the same.
    return secrets.token_hex(32)
