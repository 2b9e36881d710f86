"""Identity of a process, garbage collection while it starts, and modules that run in a separate process.

The system may reuse a pid, so a process is identified by its pid and its start: the boot id, and the clock ticks from
boot to start. A start in wall-clock time is not used, because it changes when the clock is set or slewed.
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

# New objects after which Python collects garbage while a process starts. Python's default is 700.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000
_PR_SET_PDEATHSIG = 1
# Last line on stderr of a process that could not import a package.
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


def stop_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a separate process; return its exit code and output. So this process need not import torch.

    Raises ModuleNotFoundError if the module could not import a package, as an import in this process would.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    if done.returncode and lines and (missing := _MISSING.match(lines[-1])):
        raise ModuleNotFoundError(lines[-1].partition(": ")[2], name=missing[1])
    return done


def identity() -> dict[str, Any]:
    """Return the fields of the event run_started that identify this process: pid, start_id, host."""
    return {"pid": os.getpid(), "start_id": start_id(os.getpid()), "host": socket.gethostname()}


def driver_lives(started: Mapping[str, Any]) -> bool:
    """Return True if the driver that wrote the event run_started still runs.

    A driver on another host cannot be checked, and counts as running. A damaged event counts as ended.
    """
    pid = started.get("pid")
    recorded_id = started.get("start_id")
    if started.get("host") not in (None, socket.gethostname()):
        return True
    if not isinstance(pid, int):
        return False
    if isinstance(recorded_id, str):
        return bool(recorded_id) and start_id(pid) == recorded_id
    # An earlier version of rlctl recorded `create_time` instead of `start_id`.
    return _earlier_lives(pid, started.get("create_time"))


def start_id(pid: int) -> str:
    """Return the start of a process as "BOOT_ID:TICKS"; "" if the process has ended, also if it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The fields after the program's name, which is in parentheses and may have any character in it.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "" if os.path.exists("/proc/self/stat") else _start_without_proc(pid)
    # proc_pid_stat(5): field 3 (here index 0) is the state, field 22 (index 19) the start in ticks since boot.
    return "" if fields[0] in (b"Z", b"X") else f"{_boot_id()}:{int(fields[19])}"


def age_s() -> float:
    """Return the seconds since this process started. Setting the machine's clock does not change the result."""
    ticks = start_id(os.getpid()).rpartition(":")[2]
    if hasattr(time, "CLOCK_BOOTTIME"):
        return uptime_s() - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - float(ticks)


def uptime_s() -> float:
    """Return the seconds of a clock that cannot be set. On Linux it also counts while the machine sleeps."""
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
    """Return the start of a process on a system without /proc, in unix seconds. Setting the clock may change it."""
    import psutil

    try:
        return f"unix:{psutil.Process(pid).create_time():.2f}"
    except (psutil.Error, OverflowError, ValueError):
        return ""


def _earlier_lives(pid: int, create_time: Any) -> bool:
    """Return True if a driver still runs that an earlier version of rlctl recorded with its start in unix seconds.

    After the clock was set, the driver counts as ended. The lock on its run still keeps a second driver away.
    """
    import psutil

    try:
        return bool(abs(psutil.Process(pid).create_time() - create_time) < 1.0)
    except (psutil.Error, OverflowError, ValueError, TypeError):
        return False


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect garbage less often within the block, for imports at the start of a process.

    Imports of torch, transformers and vLLM make a million objects that stay. Each collection looks at these again. This
    takes 0.9 s of the 5 s for a tokenizer, and 1 s of the 9 s for vLLM.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
