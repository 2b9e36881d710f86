"""Live views of a run: a thread follows its files and shows a screen (`LiveDashboard`) or lines (`LineView`).

They read the run directory and nothing else, so a live, a finished and a copied run look the same.
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

POLL_S = 0.25
# Without news the screen is still redrawn this often, for its clocks.
IDLE_REDRAW_S = 0.5


class RunView(ABC):
    """Shows a run from its files while the `with` block runs, then prints the summary.

    A failure in here ends the view, never the run; its reason is printed at the end.
    """

    # True if it shows rollouts.
    samples = False
    # Sequence that gives the terminal back to the shell.
    leave_screen = ""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run = run
        # A run may have many steps, each with many metrics. The driver must not grow with their number.
        self.reader = RunReader(run.path, self.samples, LIVE_POINTS)
        # The run_ended event, set by the run's own process: its file may have had no room.
        self.end: Record | None = None
        self.console = console
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="run view", daemon=True)

    @abstractmethod
    def update(self) -> None:
        """Read new records and show them."""

    def screen(self) -> AbstractContextManager[object]:
        """Return the context in which `update` is called."""
        return nullcontext()

    def __enter__(self) -> "RunView":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        # All steps count in the summary.
        state = read_state(self._run.path)
        if self.end:
            state.end_with(self.end)
        say_goodbye(state, self.console, self._failure)

    def give_back(self, last_words: str) -> None:
        """Leave the screen and print, for a process that ends inside the block. Takes no lock."""
        with suppress(OSError, ValueError):
            os.write(self.console.file.fileno(), f"{self.leave_screen}{last_words}\n".encode())

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Block until the run has ended or died, or is given up: for a viewer that is not the run itself."""
        while self.reader.state.status in ("new", "running") and self._thread.is_alive() and not given_up():
            time.sleep(POLL_S)

    def _follow(self) -> None:
        try:
            with self.screen():
                while not self._stop.wait(POLL_S):
                    self.update()
                self.update()
        except BrokenPipeError:
            # The reader has left, as of `| head -2`. Output goes to nothing from now on: a print must not end the run.
            with suppress(SystemExit, OSError):
                self.console.on_broken_pipe()
        except Exception as failure:
            self._failure = failure


class LiveDashboard(RunView):
    """The dashboard on a terminal's alternate screen."""

    samples = True
    leave_screen = "\x1b[?1049l\x1b[?25h"

    def __init__(self, run: RunDir, console: Console | None = None) -> None:
        super().__init__(run, console or SafeConsole())
        self._drawn = 0.0
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
        fresh = bool(self.reader.poll())
        if self.console.size != self._size:
            self.console.clear()
            fresh = True
        if fresh or time.monotonic() - self._drawn >= IDLE_REDRAW_S:
            self._drawn = time.monotonic()
            self._size = self.console.size
            width, height = self._size
            self._live.update(render(self.reader.state, width, height), refresh=True)


class LineView(RunView):
    """One line a step for pipes and log files."""

    def __init__(self, run: RunDir, every: int, since: float, out: TextIO | None = None) -> None:
        """every: steps from one line to the next; the last step is shown too. since: unix seconds, see `show_run`."""
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
    """Show `run` while the block runs, and its summary after it.

    The dashboard is for a terminal, lines are for everything else, never both. dashboard, every: telemetry.dashboard
    and run.log_every. since: unix seconds of the attempt's start; lines are of later records. Emit run_ended before
    leaving the block, and tell the view. Under the dashboard, other output of this process goes to
    logs/latest/driver.log: start the attempt first.
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
    """Yield a stream to the terminal; file descriptors 1 and 2, native code's too, append to `log`.

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
        # The terminal may be closed, with text on its way.
        with suppress(OSError):
            terminal.close()
        for descriptor in (*saved, target):
            os.close(descriptor)
