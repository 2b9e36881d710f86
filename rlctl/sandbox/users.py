"""User ids for programs, so that the kernel counts the processes of each program apart."""

import contextlib
import os
import threading
from itertools import count
from pathlib import Path

# Far from the ids of people and services. The kernel has ids up to 2**32 - 2.
_FIRST_USER = 1 << 30
_NUMBERS = count()
_LOCK = threading.Lock()
_USERS_PER_PROCESS = 1 << 9


def free_user() -> int:
    """Return a user id that no other program here has now. Ids of one process come round after 512 programs.

    In a container without that many ids, the ids of two processes may be equal: their programs then share a limit on
    processes.
    """
    with _LOCK:
        number = next(_NUMBERS) % _USERS_PER_PROCESS
    offset = os.getpid() * _USERS_PER_PROCESS + number
    first, size = _mapped_users()
    if first <= _FIRST_USER and first + size >= _FIRST_USER + (1 << 29):
        return _FIRST_USER + offset % (1 << 29)
    # A small map: its upper half, without the last ids.
    half = max(1, size // 2 - 2)
    return first + size // 2 + offset % half


def folder_user(folder: Path | None) -> int:
    """Return the user id for a program in a kept folder: the earlier program's, so that both own the files.

    None: a new folder, with a new user id.
    """
    if folder is not None:
        owner = folder.stat().st_uid
        if owner >= _FIRST_USER:
            return owner
    return free_user()


def count_tasks(user: int) -> int:
    """Return the number of processes and threads of a user."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process may end meanwhile.
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _mapped_users() -> tuple[int, int]:
    """Return first and number of the user ids of this process's namespace."""
    first, _, size = Path("/proc/self/uid_map").read_text().splitlines()[-1].split()
    return int(first), int(size)
