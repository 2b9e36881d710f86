"""Leaves nothing behind, also when the driver is killed: a small process that outlives it by two seconds.

Ray's own processes notice a dead driver, but two of its agents live on (seen with Ray 2.60), and nobody removes
the folders. The reaper waits at the other end of a pipe; when the driver is gone it ends every process that holds
a file of the watched folders open, and removes the folders. Runs as a program of its own: `python reaper.py`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

GRACE_S = 2.0


class Reaper:
    """The driver's end. `folder` makes a folder that is gone, with whoever uses it, when the driver is."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True, cwd="/", text=True
        )

    @contextmanager
    def folder(self, prefix: str, root: str | None = None) -> Iterator[Path]:
        """A new folder for the time of the block."""
        path = self.make(prefix, root)
        try:
            yield path
        finally:
            sweep([path])

    def make(self, prefix: str, root: str | None = None) -> Path:
        """A new folder, for the caller to remove before it closes the reaper."""
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._tell(str(path))
        return path

    def close(self) -> None:
        """Nothing is left to do: let the reaper go."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def sweep(folders: list[Path]) -> None:
    """End every other process that holds a file in `folders` open, then remove them."""
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _uses(process, folders):
            with contextlib.suppress(psutil.Error):
                process.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _uses(process: psutil.Process, folders: list[Path]) -> bool:
    try:
        paths = [Path(file.path) for file in process.open_files()]
    except (psutil.Error, OSError):
        return False
    return any(path.is_relative_to(folder) for path in paths for folder in folders)


def main() -> None:
    """Read folders until the driver's end of the pipe closes; then clean up what is still there."""
    # Ray ends a worker's children with it, but not theirs.
    if os.fork():
        os.wait()
        return
    folders = [Path(line.strip()) for line in sys.stdin]
    left = [folder for folder in folders if folder.exists()]
    if left:
        time.sleep(GRACE_S)
        sweep(left)


if __name__ == "__main__":
    main()
