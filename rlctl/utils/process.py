"""Identity of the process that drives a run: pid and start time, since a pid may be reused."""

import os
import socket
from typing import Any


def identity() -> dict[str, Any]:
    """Return the fields of run_started that identify this process: pid, create_time (unix seconds), host."""
    import psutil

    return {
        "pid": os.getpid(),
        "create_time": psutil.Process().create_time(),
        "host": socket.gethostname(),
    }


def lives(pid: int, create_time: float, host: str | None) -> bool:
    """Return True if that process still runs, and for a process of another host, which cannot be seen."""
    import psutil

    if host not in (None, socket.gethostname()):
        return True
    try:
        return abs(psutil.Process(pid).create_time() - create_time) < 1.0
    except psutil.Error:
        return False
