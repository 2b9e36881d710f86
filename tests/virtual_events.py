"""Event loop on virtual time and on the caller's thread, for simulations and tests.

A seed may draw which ready callback runs next: asyncio's own order is first in, first out.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, TypeVar

from rlctl.utils.event_loop import ANSWER_S, CLOSED, WAITS_FOR_ITSELF, EventLoop, no_answer, refusal

Value = TypeVar("Value")
# With a seed: share of the steps of a waiting call in which `happen` is called although callbacks are ready.
_ELSE = 0.05


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio loop that runs a callback only when `step` is called. now: returns the loop's time.

    draw: draws which ready callback runs next; None for first in, first out.
    """

    # Fields of asyncio's BaseEventLoop.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, now: Callable[[], float], draw: Random | None) -> None:
        super().__init__()
        self._now = now
        self._draw = draw

    def step(self) -> bool:
        """Run one ready callback. Return False if none was ready."""
        moment = self.next_timer()
        while moment is not None and moment <= self._now():
            self._ready.append(heapq.heappop(self._scheduled))
            moment = self.next_timer()
        if not self._ready:
            return False
        if self._draw:
            self._ready.rotate(self._draw.randrange(len(self._ready)))
        handle = self._ready.popleft()
        if not handle.cancelled():
            self.call_inside(handle._run)
        return True

    def call_inside(self, function: Callable[[], Value]) -> Value:
        """Call a function as a callback of this loop. Raises RuntimeError inside another one."""
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(WAITS_FOR_ITSELF)
        asyncio._set_running_loop(self)
        try:
            return function()
        finally:
            asyncio._set_running_loop(None)

    def next_timer(self) -> float | None:
        """Return the time at which the next timer is due; None if there is no timer."""
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        return self._scheduled[0].when() if self._scheduled else None

    def time(self) -> float:
        return self._now()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: `next_timer` drops cancelled timers."""

    def _write_to_self(self) -> None:
        """Do nothing, because the loop has no other thread to wake."""

    def __del__(self) -> None:
        """Print no warning about a loop that is dropped before it is closed."""


class VirtualEvents(EventLoop):
    """`EventLoop` without a thread: a call that waits runs the loop's steps itself.

    happen: called by a wait when no callback is ready; None: the next job is done, or time passes to the next timer.
    draw: draws the callback of each step, and lets anything happen in between.
    """

    loop: VirtualLoop

    def __init__(self, happen: Callable[[], None] | None = None, draw: Random | None = None) -> None:
        self.time = 0.0
        self._happen = happen or self.go_on
        self._draw = draw
        # (function given to `in_thread`, future of its value), for functions that were not called yet.
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._adopt(VirtualLoop(lambda: self.time, draw))

    def step(self) -> bool:
        """Run one ready callback or, without a seed, all ready callbacks. Return False if none was ready."""
        stepped = self.loop.step()
        while stepped and not self._draw and self.loop.step():
            pass
        return stepped

    def ask(self, function: Callable[[], Value]) -> Value:
        return self.loop.call_inside(function)

    def run(self, work: Coroutine[Any, Any, Value], deadline_s: float = ANSWER_S) -> Value:
        """Run a coroutine and return its value. Call `happen` while it waits. Raises RuntimeError like `EventLoop`."""
        if asyncio._get_running_loop() is not None:
            raise refusal(work, WAITS_FOR_ITSELF)
        if self.loop.is_closed():
            raise refusal(work, CLOSED)
        task = self.loop.create_task(work)
        end = self.time + deadline_s
        while not task.done():
            if self.time > end:
                task.cancel()
                raise no_answer(deadline_s)
            if not self.step() or (self._draw and self._draw.random() < _ELSE):
                self._happen()
        return task.result()

    async def in_thread(self, name: str, function: Callable[[], Value]) -> Value:
        ended: asyncio.Future[Value] = self.loop.create_future()
        self._jobs.append((function, ended))
        return await ended

    def work(self) -> bool:
        """Call the next function of `in_thread`, as its thread would. Return False if there is none."""
        if not self._jobs:
            return False
        function, ended = self._jobs.popleft()
        try:
            settle = partial(ended.set_result, function())
        except Exception as error:
            settle = partial(ended.set_exception, error)
        if not ended.cancelled():
            settle()
        return True

    def go_on(self) -> None:
        """Do the next job, or let time pass to the next timer. Raises RuntimeError if there is none: a defect."""
        if self.work():
            return
        moment = self.loop.next_timer()
        if moment is None:
            raise RuntimeError("nothing is under way: a wait would never end")
        self.time = max(self.time, moment)

    def let_pass(self, seconds: float) -> None:
        """Advance virtual time by `seconds`, and run everything that happens in this time."""
        end = self.time + seconds
        while True:
            while self.step() or self.work():
                pass
            moment = self.loop.next_timer()
            if moment is None or moment > end:
                break
            self.time = max(self.time, moment)
        self.time = end

    def close(self) -> None:
        """Cancel all tasks, make the steps that need no time, and close the loop."""
        if self._closes:
            return
        self._closes = True
        self._cancel_tasks()
        while self.loop.step():
            pass
        self.loop.close()
