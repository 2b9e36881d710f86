"""Files that are there whole or not at all."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by this content, text as UTF-8. A reader, also after a kill, finds the old file or the new one.

    Nothing is written through a symbolic link: a link at `path` is replaced. Raises OSError with the file's name.
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
    """Return the bytes of all files below `folder`; 0 without one. A file that goes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat(follow_symlinks=False).st_size
    return total


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reserve:
    """Disk space released at the end of a run, so that its last records fit on a full disk."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Reserve the space, unless the disk is full already."""
        self._path = path
        with suppress(OSError), path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)

    def release(self) -> None:
        """Release the space."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def foreign_link(path: Path) -> Path | None:
    """Return a symbolic link in `path` that another user made, and could redirect; None if there is none."""
    for part in [path.absolute(), *path.absolute().parents]:
        try:
            status = part.lstat()
        except OSError:
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            return part
    return None


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a new file that only its owner reads."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
