"""Explanations of calls that take long: the waiting part and its partner, long before the deadline (contract 8).

The driver's threads open a wait around each call; one thread looks at the open ones. A call is explained once it takes
longer than `explain_after_s` and three times as long as any earlier call of its name. If a worker's process is stopped,
`explain_after_s` is enough.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_WAIT_POLL_S = 0.5
_UNUSUAL = 3.0


# Workers and their process ids, where these are known.
Late = Callable[[], Sequence[tuple[str, int | None]]]


@dataclass
class _Wait:
    """One open wait."""

    call: str
    # Returns (worker, process id or None) of each worker without an answer.
    late: Late
    deadline_s: float
    knob: str
    began: float = field(default_factory=time.monotonic)
    # Seconds of the wait when it was last explained.
    told: float = 0.0
    ended: bool = False


class Waits:
    """The calls that the driver waits for."""

    def __init__(self, explain_after_s: float, warn: Callable[[str], None]) -> None:
        self._explain_after_s, self._warn = explain_after_s, warn
        # Returns the state of the run, in words; may be set later.
        self.where: Callable[[], str] = lambda: "start-up"
        self._open: dict[int, _Wait] = {}
        self._longest: dict[str, float] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch_waits, name="waits", daemon=True).start()

    @contextmanager
    def wait(self, call: str, late: Late, deadline_s: float, knob: str) -> Iterator[None]:
        """Explain the block if it lasts. knob: the config key that sets its deadline."""
        wait = _Wait(call, late, deadline_s, knob)
        with self._lock:
            self._open[id(wait)] = wait
        try:
            yield
        finally:
            wait.ended = True
            with self._lock:
                del self._open[id(wait)]
                self._longest[call] = max(self._longest.get(call, 0.0), time.monotonic() - wait.began)

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()

    def _watch_waits(self) -> None:
        while not self._ended.wait(_WAIT_POLL_S):
            self._look_once()

    def _look_once(self) -> None:
        # A separate function: a local of `_watch_waits` would hold the last wait, and so references of Ray's. This
        # thread would then drop them at its next look. After Ray's shutdown that ends the whole process with 1
        # ("The core worker has already been shutdown", Ray 2.60).
        with self._lock:
            waits = list(self._open.values())
        for wait in waits:
            self._explain_wait(wait)

    def _explain_wait(self, wait: _Wait) -> None:
        lasted = time.monotonic() - wait.began
        try:
            what = self._explanation(wait, lasted)
        except Exception as error:
            # Later waits must be explained all the same.
            what = f"the driver has waited {lasted:.0f} s, call {wait.call}; for whom cannot be told: {error!r}"
        wait.told = lasted if what else wait.told
        if what and not wait.ended:
            with suppress(Exception):
                self._warn(what)

    def _explanation(self, wait: _Wait, lasted: float) -> str:
        """Return who is waited for, and why; an empty text for a wait that is still usual."""
        if lasted < max(self._explain_after_s, 2 * wait.told):
            return ""
        late = [(name, condition(pid)) for name, pid in wait.late()]
        stopped = any("stopped" in state for _, state in late)
        if not late or (lasted < _UNUSUAL * self._longest.get(wait.call, 0.0) and not stopped):
            return ""
        workers = ", ".join(f"{name} ({state})" if state else name for name, state in late)
        end = f"given up after {wait.deadline_s:g} s ({wait.knob})"
        return f"the driver has waited {lasted:.0f} s for {workers}, call {wait.call}; {self.where()}; {end}"


def condition(pid: int | None) -> str:
    """Return the state of a process of this machine; an empty text for None."""
    import psutil

    if pid is None:
        return ""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED:
            return f"process {pid} is stopped: kill -CONT {pid}"
        before = sum(process.cpu_times()[:2])
        time.sleep(_WAIT_POLL_S / 5)
        busy = (sum(process.cpu_times()[:2]) - before) / (_WAIT_POLL_S / 5)
    except psutil.Error:
        return f"process {pid} is gone"
    return f"process {pid} uses {busy:.0%} of a core"
