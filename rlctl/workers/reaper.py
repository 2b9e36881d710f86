"""Reaper: a small process that outlives a killed driver by two seconds, and removes the driver's folders and processes.

Most of Ray's processes notice a dead driver, but two of its agents continue (seen with Ray 2.60), and nobody removes
the folders. The reaper waits at the other end of a pipe. When the driver is gone, the reaper ends every process that
uses the watched folders, and removes the folders. It is a separate program: `python reaper.py`.

If driver and reaper are killed, the folders stay. Each folder has a file on which its driver holds a lock. If the lock
is free, the driver is dead, even if its process id is in use again, and the next run removes the folder.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rlctl-"
_OWNER = ".owner"
_LENGTH_BYTES = 4


class Reaper:
    """The driver's side of the reaper process: it makes folders, and the reaper watches them.

    When the driver is gone, the reaper ends the processes that use the folders, and removes the folders.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True, cwd="/", bufsize=0
        )

    @contextmanager
    def folder(self, prefix: str, root: str | None = None) -> Iterator[Path]:
        """Make a folder. When the block ends, end the processes that use it and remove it."""
        path = self.make(prefix, root)
        try:
            yield path
        finally:
            sweep([path])
            os.close(self._locks.pop(path))

    def make(self, prefix: str, root: str | None = None) -> Path:
        """Make a folder that only this user can enter. The caller removes the folder before it closes the reaper."""
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._locks[path] = _mark_folder(path)
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode_path(path))
        return path

    def close(self) -> None:
        """End the reaper process, and release the locks on the folders."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin
            self._process.stdin.close()
        self._process.wait()
        for descriptor in self._locks.values():
            os.close(descriptor)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder. It is removed when the block ends, or two seconds after this process is killed."""
    reaper = Reaper()
    try:
        with reaper.folder(prefix) as path:
            yield path
    finally:
        reaper.close()


@dataclass(frozen=True)
class Leftover:
    """A folder of a dead driver."""

    path: Path
    # Text that names the driver, such as "process 123".
    owner: str
    # (pid, name) of processes that still use the folder.
    processes: tuple[tuple[int, str], ...]
    nbytes: int

    def __str__(self) -> str:
        used = ", ".join(f"{name} {pid}" for pid, name in self.processes)
        return f"{self.path} ({self.nbytes / 2**20:.1f} MiB{f', in use by {used}' if used else ''}) of {self.owner}"


def leftovers(roots: Sequence[Path] | None = None) -> list[Leftover]:
    """Return the folders that killed drivers of this user left behind.

    roots: folders to search; None: the folders for temporary files, and shared memory.
    """
    if roots is None:
        roots = [Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY]
    paths: set[Path] = set()
    for root in set(roots):
        paths.update(root.glob(f"{_PREFIX}*"))
    folders = []
    for path in sorted(paths):
        owner = _dead_owner(path)
        if owner is not None:
            processes = tuple(_processes_using(path))
            folders.append(Leftover(path=path, owner=owner, processes=processes, nbytes=_folder_bytes(path)))
    return folders


def sweep(folders: Sequence[Path]) -> None:
    """End every other process of this user that uses any of `folders`, then remove the folders."""
    for process in _user_processes():
        if process.pid != os.getpid() and _uses(process, folders):
            with contextlib.suppress(psutil.Error):
                process.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system; 0 if there is no such folder."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def _mark_folder(folder: Path) -> int:
    """Lock a new folder for this process; return a descriptor that holds the lock until it is closed."""
    # The file is renamed after it is locked, so that no other process finds it unlocked.
    unnamed = folder / f"{_OWNER}-"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"process {os.getpid()}".encode())
    unnamed.rename(folder / _OWNER)
    return descriptor


def _dead_owner(folder: Path) -> str | None:
    """Return the text that names a folder's owner, if the folder is this user's and the owner is dead; else None."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        # Only a folder that `make` could have made: another user may have put anything else there.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Raises BlockingIOError, an OSError, while the owner lives and holds the lock.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.read(descriptor, 200).decode(errors="replace")
        finally:
            os.close(descriptor)
    return None


def _user_processes() -> Iterator[psutil.Process]:
    """Yield this user's processes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                yield process


def _processes_using(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield (pid, name) of each process of this user that uses a folder, except processes that end meanwhile."""
    for process in _user_processes():
        with contextlib.suppress(psutil.Error):
            if _uses(process, [folder]):
                yield process.pid, process.name()


def _uses(process: psutil.Process, folders: Sequence[Path]) -> bool:
    """Return True if a process has an open file in one of the folders, or its folder for temporary files there."""

    def is_inside(path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in folders)

    try:
        paths = [Path(file.path) for file in process.open_files()]
        # A process may have no open file in the folder, but TMPDIR of all processes of a run is inside it.
        paths.append(Path(process.environ().get("TMPDIR") or "/"))
    except (psutil.Error, OSError):
        return False
    return any(is_inside(path) for path in paths)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def encode_path(path: Path) -> bytes:
    """Return a path encoded for the pipe: its length, then its bytes. A separator could be part of a path."""
    name = os.fsencode(path)
    return len(name).to_bytes(_LENGTH_BYTES, "big") + name


def decode_paths(message: bytes) -> Iterator[Path]:
    """Yield every complete path of a message. The last path may be incomplete if the driver was killed."""
    while len(message) >= _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "big")
        if len(message) < end:
            return
        yield Path(os.fsdecode(message[_LENGTH_BYTES:end]))
        message = message[end:]


def main() -> None:
    """Read folders until the driver's end of the pipe closes; then remove the folders that still exist."""
    # Ray kills the children of a dead worker, but not its grandchildren: continue as a grandchild.
    if os.fork():
        os.wait()
        return
    folders = [folder for folder in decode_paths(sys.stdin.buffer.read()) if folder.exists()]
    if folders:
        time.sleep(GRACE_S)
        sweep(folders)


if __name__ == "__main__":
    main()
