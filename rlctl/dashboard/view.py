"""Live views of a run: a thread follows the run's files and shows a screen (`LiveDashboard`) or lines (`LineView`).

A view reads only the run directory, so a live, a finished and a copied run look the same.
"""

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live

from rlctl.dashboard.console import PIPE_WIDTH, SafeConsole
from rlctl.dashboard.dashboard import render
from rlctl.dashboard.plain_log import LineFormat
from rlctl.dashboard.state import LIVE_POINTS, RunReader, read_state
from rlctl.dashboard.summary import say_goodbye
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.jsonl import Record
from rlctl.utils.safe_text import neutral

# Seconds between two readings of the run's files.
POLL_S = 0.25
# Seconds between two drawings of the screen if there are no new records, so that its clocks go on.
IDLE_REDRAW_S = 0.5


class RunView(ABC):
    """View that shows a run from its files while the `with` block runs, then prints the summary.

    An error of the view ends the view and never the run. It is printed at the end.
    """

    # True if the view shows rollouts.
    samples = False
    # Escape sequence that leaves the terminal's alternate screen.
    leave_screen = ""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run = run
        # Limited, because this runs in the driver, whose memory must not grow with the numbers of steps and metrics.
        self.reader = RunReader(run.path, self.samples, LIVE_POINTS)
        # The run_ended event, set by the run's process in case a full disk kept it out of events.jsonl.
        self.end: Record | None = None
        self.console = console
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="run view", daemon=True)

    @abstractmethod
    def update(self) -> None:
        """Read new records and show them."""

    def screen(self) -> AbstractContextManager[object]:
        """Return the context manager within which `update` is called."""
        return nullcontext()

    def __enter__(self) -> "RunView":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        # Read again without a limit, because the summary is over all steps.
        state = read_state(self._run.path)
        if self.end:
            state.end_with(self.end)
        say_goodbye(state, self.console, self._failure)

    def give_back(self, last_words: str) -> None:
        """Leave the alternate screen and print `last_words`, before the process ends in the block. Takes no lock."""
        with suppress(OSError, ValueError):
            os.write(self.console.file.fileno(), f"{self.leave_screen}{last_words}\n".encode())

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Block until the run has ended or died, or `given_up` returns True. For a process that is not the driver."""
        while self.reader.state.status in ("new", "running") and self._thread.is_alive() and not given_up():
            time.sleep(POLL_S)

    def _follow(self) -> None:
        """Show the run's records until `_stop` is set, as the body of the view's thread."""
        try:
            with self.screen():
                while not self._stop.wait(POLL_S):
                    self.update()
                self.update()
        except BrokenPipeError:
            # The reader of the pipe has gone, for example `| head -2`. Discard further output, so that no print raises.
            with suppress(SystemExit, OSError):
                self.console.on_broken_pipe()
        except Exception as failure:
            self._failure = failure


class LiveDashboard(RunView):
    """View that draws the dashboard on a terminal's alternate screen."""

    samples = True
    leave_screen = "\x1b[?1049l\x1b[?25h"

    def __init__(self, run: RunDir, console: Console | None = None) -> None:
        super().__init__(run, console or SafeConsole())
        self._drawn_at = 0.0
        self._size = self.console.size
        self._live = Live(
            console=self.console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )

    def screen(self) -> AbstractContextManager[object]:
        return self._live

    def update(self) -> None:
        must_draw = bool(self.reader.poll())
        if self.console.size != self._size:
            self.console.clear()
            must_draw = True
        if must_draw or time.monotonic() - self._drawn_at >= IDLE_REDRAW_S:
            self._drawn_at = time.monotonic()
            self._size = self.console.size
            width, height = self._size
            self._live.update(render(self.reader.state, width, height), refresh=True)


class LineView(RunView):
    """View that prints one line for each step, for pipes and log files."""

    def __init__(self, run: RunDir, every: int, since: float, out: TextIO | None = None) -> None:
        """every: number of steps from one line to the next; the last step is shown too. since: see `show_run`."""
        self._out = out or sys.stdout
        super().__init__(run, SafeConsole(file=self._out, width=None if self._out.isatty() else PIPE_WIDTH))
        self._format = LineFormat(every)
        self._since = since

    def update(self) -> None:
        for record in self.reader.poll():
            if float(record["time"]) >= self._since:
                for line in self._format.lines(record):
                    print(neutral(line).encode("ascii", "replace").decode(), file=self._out, flush=True)


@contextmanager
def show_run(run: RunDir, dashboard: Literal["auto", "on", "off"], every: int, since: float) -> Iterator[RunView]:
    """Show `run` while the block runs, and its summary after the block.

    A terminal gets the dashboard, any other output gets lines. dashboard: telemetry.dashboard. every: run.log_every.
    since: unix seconds of the attempt's start; earlier records give no lines. The caller must emit run_ended, and set
    the view's `end`, before it leaves the block. Under the dashboard, other output of this process goes to
    logs/latest/driver.log, so the attempt must have started before.
    """
    if dashboard == "on" or (dashboard == "auto" and sys.stdout.isatty()):
        with (
            terminal_alone(run.logs / "driver.log") as terminal,
            LiveDashboard(run, SafeConsole(file=terminal)) as screen,
        ):
            yield screen
    else:
        with LineView(run, every, since) as lines:
            yield lines


@contextmanager
def terminal_alone(log: Path) -> Iterator[TextIO]:
    """Yield a stream to the terminal, and redirect file descriptors 1 and 2 to the end of `log`.

    This includes output of native code and of child processes. Both descriptors are restored at the end, also after an
    error, so that a traceback is seen.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved_stdout = os.dup(1)
    saved_stderr = os.dup(2)
    log_descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    terminal = os.fdopen(os.dup(saved_stdout), "w", encoding="utf-8", errors="replace")
    try:
        os.dup2(log_descriptor, 1)
        os.dup2(log_descriptor, 2)
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved_stdout, 1)
        os.dup2(saved_stderr, 2)
        # A terminal that was closed cannot take the text that is still buffered.
        with suppress(OSError):
            terminal.close()
        for descriptor in (saved_stdout, saved_stderr, log_descriptor):
            os.close(descriptor)
