"""Working folder of a program: files written and read back, size, and removal.

The program owns the folder, and may have put links, pipes or deep folders there. So each step goes by descriptors, and
follows no link.
"""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlctl.sandbox.base import split_path

# More files than this count as the end of the limit on files.
MOST_FILES = 10_000
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class WorkFolder:
    """Folder on this machine with a program's working folder and its private folder for temporary files.

    kept: working folder of the caller, which is not removed. owner: user id of the program; None: this process's.
    """

    def __init__(self, kept: Path | None, owner: int | None) -> None:
        self._owner = owner
        self._root = Path(tempfile.mkdtemp(prefix="rlctl-program-"))
        self.temporary = self._root / "tmp"
        self.work = kept or self._root / "work"
        self._make_own_folder(self.temporary)
        if kept is None:
            self._make_own_folder(self.work)
        elif owner is not None and self.work.stat().st_uid != owner:
            self._give_tree(self.work, owner)
        if owner is not None:
            # Only to be passed through: a program of another user reaches its folders by their names.
            self._root.chmod(0o711)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files into the working folder, each in place of a file or link of its name."""
        for name, content in files.items():
            *folders, file_name = split_path(name)
            parent = self._open_folder(folders, make=True)
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file_name, dir_fd=parent)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(file_name, flags, 0o644, dir_fd=parent)
                with open(descriptor, "wb") as file:
                    file.write(content)
                    self._give_descriptor(descriptor)
            finally:
                os.close(parent)

    def read(self, names: Iterable[str], most_bytes: int) -> tuple[dict[str, bytes], dict[str, str]]:
        """Return the content of each plain file of `names`, and the reason for each other name.

        most_bytes: the most bytes of all files together.
        """
        files = dict[str, bytes]()
        missing = dict[str, str]()
        free_bytes = most_bytes
        for name in names:
            try:
                content = self._read_file(name, free_bytes)
            except OSError as error:
                missing[name] = error.strerror or "cannot be read"
                continue
            if content is None:
                missing[name] = "no plain file"
            elif len(content) > free_bytes:
                missing[name] = f"more than {most_bytes} bytes with the files before it"
            else:
                files[name] = content
                free_bytes -= len(content)
        return files, missing

    def exceeds(self, most_bytes: int) -> bool:
        """Return True if the program's files have more bytes than this, or are too many, or too deep to be counted."""
        total = 0
        count = 0
        waiting = [str(self.work), str(self.temporary)]
        while waiting:
            path = waiting.pop()
            try:
                with os.scandir(path) as files:
                    for file in files:
                        count += 1
                        if file.is_dir(follow_symlinks=False):
                            waiting.append(file.path)
                        else:
                            total += file.stat(follow_symlinks=False).st_blocks * 512
                        if count > MOST_FILES or total > most_bytes:
                            return True
            except OSError as error:
                # Others: the program has removed the folder, or closed it to everybody.
                if error.errno == errno.ENAMETOOLONG:
                    return True
        return False

    def remove(self) -> None:
        """Remove everything but a kept working folder."""
        try:
            shutil.rmtree(self._root)
        except (OSError, RecursionError):
            # Folders without permissions, or too deep for recursion. `rm` and `chmod` handle both.
            for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):
                subprocess.run([*command, self._root], stderr=subprocess.DEVNULL, check=False)

    def _make_own_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)

    def _give_tree(self, folder: Path, owner: int) -> None:
        """Give a kept folder to the program's user, which is another one for each program."""
        for _, _, file_names, descriptor in os.fwalk(folder):
            os.fchown(descriptor, owner, owner)
            for file_name in file_names:
                os.chown(file_name, owner, owner, dir_fd=descriptor, follow_symlinks=False)

    def _give_descriptor(self, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)

    def _open_folder(self, parts: Iterable[str], make: bool) -> int:
        """Return a descriptor of a folder in the working folder, without following links. make: make missing ones."""
        descriptor = os.open(self.work, _FOLDER_FLAGS)
        for part in parts:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=descriptor)
                inner = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = inner
            if make:
                self._give_descriptor(descriptor)
        return descriptor

    def _read_file(self, name: str, most_bytes: int) -> bytes | None:
        """Return at most one byte more than `most_bytes`; None if it is no plain file."""
        *folders, file_name = split_path(name)
        parent = self._open_folder(folders, make=False)
        try:
            # O_NONBLOCK: to open a pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(file_name, flags, dir_fd=parent)
        finally:
            os.close(parent)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(most_bytes + 1)
