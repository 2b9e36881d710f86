"""Which view a run gets: the dashboard on a terminal, a line a step elsewhere, never both."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from rlctl.dashboard.dashboard import LiveDashboard
from rlctl.dashboard.plain_log import LineView
from rlctl.dashboard.safe_console import SafeConsole
from rlctl.run.run_dir import RunDir
from rlctl.utils.process import identity

# The start time of a process is known to a second.
CLOCK_SLACK_S = 2.0


@contextmanager
def show_run(run: RunDir, dashboard: Literal["auto", "on", "off"], every: int) -> "Iterator[LiveDashboard | LineView]":
    """Shows `run` while the block runs, and its summary after it.

    dashboard, every: telemetry.dashboard and run.log_every. Emit run_ended before leaving the block, and tell the view.
    Under the dashboard, other output of this process goes to logs/latest/driver.log: start the attempt first.
    """
    if dashboard == "on" or (dashboard == "auto" and sys.stdout.isatty()):
        with (
            terminal_alone(run.logs / "driver.log") as terminal,
            LiveDashboard(run, SafeConsole(file=terminal)) as view,
        ):
            yield view
    else:
        with LineView(run, every, identity()["create_time"] - CLOCK_SLACK_S) as view:
            yield view


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
