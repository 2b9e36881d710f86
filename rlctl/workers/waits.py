"""Warnings about calls that take long: they say which workers the driver waits for, before the deadline (contract 8).

Each call of the driver is registered while it waits for answers. One thread checks the registered calls. It warns of a
call that takes longer than `explain_after_s` and three times as long as the longest earlier call of the same method. If
a worker's process is stopped, it warns after `explain_after_s`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_WAIT_POLL_S = 0.5
# Seconds over which the CPU use of a late worker is measured.
_MEASURED_S = 0.1
# A call is unusual if it takes this many times as long as the longest earlier one.
_UNUSUAL = 3.0

# Returns (worker, process id or None) of each worker without an answer.
LateWorkers = Callable[[], Sequence[tuple[str, int | None]]]


@dataclass
class _Wait:
    """One open wait of the driver for a call."""

    call: str
    late_workers: LateWorkers
    deadline_s: float
    knob: str
    start: float = field(default_factory=time.monotonic)
    # Seconds that the wait had lasted when it was last explained.
    explained_at_s: float = 0.0
    has_ended: bool = False


class Waits:
    """The calls that the driver waits for. Their thread calls `warn` with an explanation of each that takes long."""

    def __init__(self, explain_after_s: float, warn: Callable[[str], None]) -> None:
        self._explain_after_s = explain_after_s
        self._warn = warn
        # Returns a text on the state of the run, for warnings. `launch` replaces this function when the loop starts.
        self.where: Callable[[], str] = lambda: "start-up"
        self._open: dict[int, _Wait] = {}
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch_waits, name="waits", daemon=True).start()

    @contextmanager
    def wait(self, call: str, late_workers: LateWorkers, deadline_s: float, knob: str) -> Iterator[None]:
        """Register a call while the block waits for its answers. knob: config key that sets the deadline."""
        wait = _Wait(call=call, late_workers=late_workers, deadline_s=deadline_s, knob=knob)
        with self._lock:
            self._open[id(wait)] = wait
        try:
            yield
        finally:
            wait.has_ended = True
            with self._lock:
                del self._open[id(wait)]
                self._longest[call] = max(self._longest.get(call, 0.0), time.monotonic() - wait.start)

    def close(self) -> None:
        """Stop checking the open waits."""
        self._is_closed.set()

    def _watch_waits(self) -> None:
        while not self._is_closed.wait(_WAIT_POLL_S):
            self._look_once()

    def _look_once(self) -> None:
        """Explain each open wait for which a warning is due."""
        # A separate function, because a local variable of `_watch_waits` would keep the last wait, and so Ray's
        # references, until the next check. Dropping these after Ray's shutdown ends the whole process with 1 ("The core
        # worker has already been shutdown", Ray 2.60).
        with self._lock:
            waits = list(self._open.values())
        for wait in waits:
            self._explain_wait(wait)

    def _explain_wait(self, wait: _Wait) -> None:
        """Warn about a wait if a warning is due. Never raises."""
        lasted_s = time.monotonic() - wait.start
        try:
            explanation = self._explanation(wait, lasted_s)
        except Exception as error:
            # This thread must continue, to explain later waits.
            explanation = (
                f"the driver has waited {lasted_s:.0f} s, call {wait.call}; for whom cannot be told: {error!r}"
            )
        if not explanation:
            return
        wait.explained_at_s = lasted_s
        if not wait.has_ended:
            with suppress(Exception):
                self._warn(explanation)

    def _explanation(self, wait: _Wait, lasted_s: float) -> str:
        """Return a text on the workers that the driver waits for, and their states; "" if no warning is due."""
        # Each further warning about the same wait comes after twice the time.
        if lasted_s < max(self._explain_after_s, 2 * wait.explained_at_s):
            return ""
        states = [(name, process_state(pid)) for name, pid in wait.late_workers()]
        if not states:
            return ""
        is_usual = lasted_s < _UNUSUAL * self._longest.get(wait.call, 0.0)
        if is_usual and not any("stopped" in state for _, state in states):
            return ""
        workers = ", ".join(f"{name} ({state})" if state else name for name, state in states)
        end = f"given up after {wait.deadline_s:g} s ({wait.knob})"
        return f"the driver has waited {lasted_s:.0f} s for {workers}, call {wait.call}; {self.where()}; {end}"


def process_state(pid: int | None) -> str:
    """Return a text on a process of this machine: stopped, gone, or its CPU use. Return "" for pid None."""
    import psutil

    if pid is None:
        return ""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED:
            return f"process {pid} is stopped: kill -CONT {pid}"
        # Seconds in user and in system mode.
        earlier_cpu_s = sum(process.cpu_times()[:2])
        time.sleep(_MEASURED_S)
        load = (sum(process.cpu_times()[:2]) - earlier_cpu_s) / _MEASURED_S
    except psutil.Error:
        return f"process {pid} is gone"
    return f"process {pid} uses {load:.0%} of a core"
