"""Identity of a process, garbage collection at its start, and modules that run in a process of their own.

A pid may be reused, so an identity is a pid and the start of that process: the boot id and the clock ticks since boot.
A wall-clock time would not do. A clock that is set, or slewed, changes when each process is said to have started.
"""

import ctypes
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Python's is 700.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000
_PR_SET_PDEATHSIG = 1
# Last line of a process that could not import a package.
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process once its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a separate process, which keeps this one free of torch. Return its exit code and output.

    Raises ModuleNotFoundError for a package that it could not import, as an import here would.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    if done.returncode and lines and (missing := _MISSING.match(lines[-1])):
        raise ModuleNotFoundError(lines[-1].partition(": ")[2], name=missing[1])
    return done


def identity() -> dict[str, Any]:
    """Return the fields of run_started that identify this process: pid, start_id, host."""
    return {"pid": os.getpid(), "start_id": start_id(os.getpid()), "host": socket.gethostname()}


def driver_lives(started: Mapping[str, Any]) -> bool:
    """Return True if the driver of a run_started event still runs, or is another host's, which cannot be seen.

    A damaged event has no driver.
    """
    pid = started.get("pid")
    recorded_id = started.get("start_id")
    if started.get("host") not in (None, socket.gethostname()):
        return True
    if not isinstance(pid, int):
        return False
    if isinstance(recorded_id, str):
        return bool(recorded_id) and start_id(pid) == recorded_id
    return _earlier_lives(pid, started.get("create_time"))


def start_id(pid: int) -> str:
    """Return when a process started, as "BOOT_ID:TICKS"; empty if it has ended, also if nobody has reaped it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "" if os.path.exists("/proc/self/stat") else _start_without_proc(pid)
    # proc_pid_stat(5): field 3 is the state, field 22 the start.
    return "" if fields[0] in (b"Z", b"X") else f"{_boot_id()}:{int(fields[19])}"


def age_s() -> float:
    """Return the seconds since this process started; a clock that was set meanwhile changes nothing."""
    ticks = start_id(os.getpid()).rpartition(":")[2]
    if hasattr(time, "CLOCK_BOOTTIME"):
        return uptime_s() - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - float(ticks)


def uptime_s() -> float:
    """Return seconds of a clock that nobody sets; where the system has one, it goes on while the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_without_proc(pid: int) -> str:
    """Return psutil's value on a system without /proc. A clock that is set may change it."""
    import psutil

    try:
        return f"unix:{psutil.Process(pid).create_time():.2f}"
    except (psutil.Error, OverflowError, ValueError):
        return ""


def _earlier_lives(pid: int, create_time: Any) -> bool:
    """Judge a driver that an earlier version of rlctl recorded, by its start in unix seconds.

    After a clock step it counts as ended. The lock on its run still keeps a second driver away.
    """
    import psutil

    try:
        return bool(abs(psutil.Process(pid).create_time() - create_time) < 1.0)
    except (psutil.Error, OverflowError, ValueError, TypeError):
        return False


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect garbage less often while the block starts a process up.

    Imports of torch, transformers and vLLM make a million objects that stay. Looking through them again and again takes
    0.9 s of 5 s for a tokenizer, and 1 s of 9 s for vLLM.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
