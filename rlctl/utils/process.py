"""Which process drives a run, and whether it still lives: pid and start time, so that a reused pid fools nobody."""

import os
import socket
from typing import Any


def identity() -> dict[str, Any]:
    """Fields of run_started that name this process: pid, create_time (unix seconds), host."""
    import psutil

    return {
        "pid": os.getpid(),
        "create_time": psutil.Process().create_time(),
        "host": socket.gethostname(),
    }


def lives(pid: int, create_time: float, host: str | None) -> bool:
    """Whether that very process runs. On another host nobody can tell from here: True."""
    import psutil

    if host not in (None, socket.gethostname()):
        return True
    try:
        return abs(psutil.Process(pid).create_time() - create_time) < 1.0
    except psutil.Error:
        return False
