"""Event loop on a virtual clock and on the caller's thread; a seed may draw which ready callback runs next."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from rlctl.bench.simulated_engine import VirtualClock
from rlctl.utils.event_loop import ANSWER_S, EventLoop, blocked

Value = TypeVar("Value")
# Share of its steps in which a wait for the loop lets anything happen besides, where a seed draws.
_ELSE = 0.05


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop that makes a step when it is told to. now: its time. draw: None is first in, first out."""

    # As `asyncio.base_events` has them.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, now: Callable[[], float], draw: Random | None) -> None:
        super().__init__()
        self._now, self._draw = now, draw

    def step(self) -> bool:
        """Run one callback that is ready; return whether there was one."""
        while self._scheduled and self._scheduled[0].when() <= self._now():
            self._ready.append(heapq.heappop(self._scheduled))
        if not self._ready:
            return False
        if self._draw:
            self._ready.rotate(self._draw.randrange(len(self._ready)))
        handle = self._ready.popleft()
        if not handle.cancelled():
            asyncio._set_running_loop(self)
            try:
                handle._run()
            finally:
                asyncio._set_running_loop(None)
        return True

    def next_timer(self) -> float | None:
        """Return when the next timer is due; None without one."""
        return min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=None)

    def time(self) -> float:
        return self._now()

    def _write_to_self(self) -> None:
        """Wake nobody: there is one thread."""

    def __del__(self) -> None:
        """Say nothing of a loop that is dropped in its midst."""


class VirtualEvents(EventLoop):
    """`EventLoop` whose steps are run by the thread that waits on a virtual clock. draw: draws the callback of each
    step.
    """

    loop: VirtualLoop

    def __init__(self, clock: VirtualClock, draw: Random | None = None) -> None:
        self._clock, self._draw = clock, draw
        # Steps in which anything ran.
        self.ran = 0
        self._adopt(VirtualLoop(clock.now, draw))
        clock.spawn("events", self.step)

    def step(self) -> bool:
        """Run a ready callback, or all without a seed; return whether there was one."""
        with self._clock.on_a_thread():
            stepped = self.loop.step()
            while stepped and not self._draw and self.loop.step():
                pass
        self.ran += stepped
        return stepped

    def run(self, work: Coroutine[Any, Any, Value], deadline_s: float = ANSWER_S) -> Value:
        """Run a coroutine and return its value; let anything happen while it waits. Raises RuntimeError."""
        task: asyncio.Task[Value] = self.loop.create_task(work)
        end = self._clock.now() + deadline_s
        while not task.done():
            if self._clock.now() > end:
                task.cancel()
                raise blocked(deadline_s)
            if not self.step() or (self._draw and self._draw.random() < _ELSE):
                self._clock.something_happens()
        return task.result()

    def close(self) -> None:
        """Do nothing: there is no thread."""
