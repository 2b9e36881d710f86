"""Gives the terminal to the dashboard alone: what the process prints otherwise goes to a log file meanwhile."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def terminal_alone(log: Path) -> Iterator[TextIO]:
    """Yields a stream to the terminal; file descriptors 1 and 2, native code's too, append to `log`.

    Child processes started inside inherit the log. Everything is put back at the end, also after an error,
    so that a traceback is seen.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    terminal = os.fdopen(os.dup(saved[0]), "w", encoding="utf-8", errors="replace")
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        terminal.close()
        for descriptor in (*saved, target):
            os.close(descriptor)
