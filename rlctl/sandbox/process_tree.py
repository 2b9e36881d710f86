"""Processes of a program, with their memory and CPU time, read from /proc.

A program's processes are the descendants of a keeper: a process of the sandbox to which the kernel gives orphans.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
# Variable of the process that starts a program. Programs themselves do not have it.
CONFINED = "RLCTL_CONFINED"
# More processes than this are not counted further: every limit is lower.
_MOST_PROCESSES = 5000


@dataclass(frozen=True)
class TreeUsage:
    """Processes below a keeper at one time."""

    pids: tuple[int, ...]
    # Processes and threads.
    tasks: int
    # Sum of resident memory. Pages that processes share count once for each.
    resident_bytes: int
    # CPU time of all, ended ones included.
    cpu_s: float

    def exact_bytes(self) -> int:
        """Return the memory of all processes, with shared pages divided among those that share them.

        Slower than `resident_bytes`. A process that cannot be read counts with nothing.
        """
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) << 10
        return total


def read_tree(keeper: int) -> TreeUsage:
    """Measure all descendants of a process. The process itself counts only with the CPU time of its ended children."""
    waiting = children_of(keeper)
    keeper_fields = _read_stat(keeper)
    cpu_ticks = _child_ticks(keeper_fields) if keeper_fields else 0
    pids = list[int]()
    tasks = 0
    resident_pages = 0
    while waiting and len(pids) < _MOST_PROCESSES:
        pid = waiting.pop()
        fields = _read_stat(pid)
        if fields is None:
            continue
        pids.append(pid)
        tasks += int(fields[17])
        resident_pages += int(fields[21])
        cpu_ticks += int(fields[11]) + int(fields[12]) + _child_ticks(fields)
        waiting += children_of(pid)
    return TreeUsage(pids=tuple(pids), tasks=tasks, resident_bytes=resident_pages * _PAGE, cpu_s=cpu_ticks / _TICKS)


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process; none if it has ended."""
    children = list[int]()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def is_confined(pid: int) -> bool:
    """Return True if a process starts a program in a sandbox, which bounds the memory of all its descendants."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(word.startswith(f"{CONFINED}=".encode()) for word in file.read().split(b"\0"))
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """Return True if a process runs: it is neither stopped by a signal nor ended."""
    fields = _read_stat(pid)
    return fields is not None and fields[0] not in (b"T", b"Z", b"X")


def _read_stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat behind the program's name; None if the process has ended.

    proc_pid_stat(5) counts from 1, and its field 3 has the index 0 here.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _child_ticks(fields: list[bytes]) -> int:
    """Return the CPU time of ended children, in clock ticks."""
    return int(fields[13]) + int(fields[14])
