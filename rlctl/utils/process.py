"""Identity of the process that drives a run (pid and start time, since a pid may be reused), and its garbage."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Python's is 700.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


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
