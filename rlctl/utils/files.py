"""Atomic writing of files, and checks and sizes of files and folders."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8. A reader finds the old content or the new, also after a kill.

    If `path` is a symbolic link, the link itself is replaced, not its target. Raises OSError with the file's name.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def folder_bytes(folder: Path) -> int:
    """Return the total bytes of all files below `folder`; 0 if there is no folder. Skip files that vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat(follow_symlinks=False).st_size
    return total


def sync(path: Path) -> None:
    """Flush a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reserve:
    """A file that reserves disk space. It is removed at the end of a run, so that the last records fit on the disk."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Write a file of `nbytes` bytes, unless the disk is full already."""
        self._path = path
        with suppress(OSError), path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)

    def release(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def foreign_link(path: Path) -> Path | None:
    """Return a part of `path` that is a symbolic link of another user; None if there is none.

    The other user could redirect such a link.
    """
    for part in [path.absolute(), *path.absolute().parents]:
        try:
            status = part.lstat()
        except OSError:
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            return part
    return None


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a new file with the permissions `mode`, by default readable for its owner alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
