"""Files that are there whole or not at all."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """The file with this content, text as UTF-8; whoever looks meanwhile, or after a kill, finds the old one.

    Nothing is written through a symbolic link: one in the file's place is replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
    temporary.replace(path)


class Reserve:
    """Room on the disk that is given back when a run ends, so that its last words fit on a disk that is full."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Claims nothing where the disk is full already."""
        self._path = path
        with suppress(OSError), path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)

    def release(self) -> None:
        """Give the room back."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def foreign_link(path: Path) -> Path | None:
    """Return the symbolic link on the way to `path` that somebody else made, who chooses where the way leads."""
    for each in [path.absolute(), *path.absolute().parents]:
        try:
            status = each.lstat()
        except OSError:
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            return each
    return None
