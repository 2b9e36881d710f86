"""The dashboard: a run's files as one screen. `render` is pure; `LiveDashboard` redraws it until told to stop.

It reads events.jsonl, metrics.jsonl and config.yaml and nothing else, so a live, a finished and a copied run
look alike.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live

from rlctl.dashboard.panels.ages import ages, bound
from rlctl.dashboard.panels.canvas import Frame, Row, beside
from rlctl.dashboard.panels.curve import curve
from rlctl.dashboard.panels.header import HEIGHT, header
from rlctl.dashboard.panels.learning import learning, legend, metrics_of
from rlctl.dashboard.panels.log import log
from rlctl.dashboard.panels.speed import balance, balance_and_devices, devices, throughput
from rlctl.dashboard.panels.startup import startup
from rlctl.dashboard.panels.timeline import lanes
from rlctl.dashboard.panels.timing import phase_times, timing
from rlctl.dashboard.safe_console import SafeConsole
from rlctl.dashboard.state import RunReader, RunState
from rlctl.dashboard.summary import say_goodbye
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.jsonl import Record

POLLS_PER_SECOND = 4
# Without news the screen is still drawn anew this often, for its clocks.
IDLE_REDRAW_S = 0.5
WIDE = 116
SPEED_HEIGHT = 5
LEAST_LOG = 3
LANES_HEIGHT = 6
# Lanes without their axis, where rows are few.
LEAST_LANES = 4


def render(state: RunState, width: int, height: int) -> Frame:
    """The whole screen, never wider than `width` nor higher than `height`; what does not fit is left out."""
    rows = header(state, width)
    room = height - HEIGHT
    if not state.steps:
        upper = min(max(3, room - 6), len(state.startup) + 3)
        rows += startup(state, width, upper)
    elif width >= WIDE:
        rows += _wide(state, width, room)
    else:
        rows += _narrow(state, width, room)
    left = height - len(rows)
    if left >= LEAST_LOG:
        rows += log(state, width, left, legend(state, width - 5) if state.steps else "")
    return Frame(rows, width, height)


def _wide(state: RunState, width: int, room: int) -> list[Row]:
    """Three columns: learning, its curve, step time; below them throughput, idle, memory. Between them, where
    training and generation go on side by side, their lanes and the ages of their groups."""
    lower = SPEED_HEIGHT + _on_devices(state)
    oldest = bound(state)
    middle = 0 if oldest is None else min(max(LANES_HEIGHT, oldest + 4), max(LEAST_LANES, room - lower - 15))
    wanted = max(len(metrics_of(state)), len(phase_times(state)), 12) + 2
    upper = max(3, min(wanted, room - lower - middle - LEAST_LOG - 3))
    first = third = width // 3
    second = width - first - third
    return [
        *beside(learning(state, first, upper), curve(state, second, upper), timing(state, third, upper)),
        *(beside(lanes(state, first + second, middle), ages(state, third, middle)) if middle else []),
        *beside(throughput(state, first, lower), balance(state, second, lower), devices(state, third, lower)),
    ]


def _narrow(state: RunState, width: int, room: int) -> list[Row]:
    """Two columns: learning and step time; below them throughput, and idle with memory. Lanes and ages as in `_wide`,
    ages in the place of idle times, which the lanes show too."""
    lower = SPEED_HEIGHT + (_on_devices(state) if room > 24 else 0)
    wanted = len(metrics_of(state)) + 2
    asynchronous = bound(state) is not None
    middle = (LANES_HEIGHT if room > 28 else LEAST_LANES) if asynchronous else 0
    upper = max(3, min(wanted, room - lower - middle - LEAST_LOG - (not asynchronous)))
    left = width // 2
    right = width - left
    return [
        *beside(learning(state, left, upper), timing(state, right, upper)),
        *(lanes(state, width, middle) if middle else []),
        *beside(throughput(state, left, lower), (ages if asynchronous else balance_and_devices)(state, right, lower)),
    ]


def _on_devices(state: RunState) -> int:
    """One row more where there is an MFU or a device's use to show."""
    return int(state.latest("throughput/mfu") is not None or state.latest("device/utilization") is not None)


class LiveDashboard:
    """Shows a run from its files while the `with` block runs; at the end, the summary.

    What fails in here ends the picture, never the run: the reason is printed at the end. end: the run_ended event, told
    by the run itself.
    """

    def __init__(self, run: RunDir, console: Console | None = None) -> None:
        self._reader = RunReader(run.path)
        self._console = console or SafeConsole()
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self.end: Record | None = None
        self._thread = threading.Thread(target=self._show, name="dashboard", daemon=True)

    def __enter__(self) -> "LiveDashboard":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._reader.poll()
        if self.end:
            self._reader.state.end_with(self.end)
        say_goodbye(self._reader.state, self._console, self._failure)

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Blocks until the run has ended or died, or is given up: for a viewer that is not the run itself."""
        while self._reader.state.status in ("new", "running") and self._thread.is_alive() and not given_up():
            time.sleep(1 / POLLS_PER_SECOND)

    def _show(self) -> None:
        try:
            with Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            ) as live:
                drawn, size = 0.0, self._console.size
                while not self._stop.wait(1 / POLLS_PER_SECOND):
                    fresh = self._reader.poll()
                    if self._console.size != size:
                        self._console.clear()
                        fresh = True
                    if fresh or time.monotonic() - drawn >= IDLE_REDRAW_S:
                        drawn, size = time.monotonic(), self._console.size
                        live.update(render(self._reader.state, *size), refresh=True)
        except Exception as failure:
            self._failure = failure
