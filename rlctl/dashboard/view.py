"""Which view a run gets: the dashboard on a terminal, a line a step elsewhere, never both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlctl.dashboard.dashboard import LiveDashboard
from rlctl.dashboard.plain_log import LineView
from rlctl.dashboard.safe_console import SafeConsole
from rlctl.dashboard.terminal import terminal_alone
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
