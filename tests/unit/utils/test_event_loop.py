"""A closed event loop has no task left, and nothing begins on it."""

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import CORO_CLOSED, getcoroutinestate

import pytest

from rlctl.utils.event_loop import WAITS_FOR_ITSELF, EventLoop
from tests.virtual_events import VirtualEvents

RANDOM = random.Random(0)


class Tasks:
    """Tasks that begin others while they end. count: tasks that began."""

    def __init__(self, events: EventLoop) -> None:
        self.events = events
        self.count = 0

    async def begin(self, depth: int) -> None:
        self.count += 1
        try:
            await asyncio.sleep(RANDOM.choice([0, 0.0005, 1000]))
        finally:
            if depth:
                self.events.loop.create_task(self.begin(depth - 1))
                self.events.spawn(self.begin(depth - 1))

    def submit(self) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            for _ in range(5):
                self.events.submit(self.begin(2))


def test_a_thousand_loops_close_while_tasks_begin_others(monkeypatch: pytest.MonkeyPatch) -> None:
    unraised_errors = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda error: unraised_errors.append(str(error.exc_value)))
    for _ in range(1000):
        tasks = Tasks(EventLoop("closed"))
        submitter = threading.Thread(target=tasks.submit)
        submitter.start()
        time.sleep(RANDOM.random() * 0.0005)
        tasks.events.close()
        count_at_close = tasks.count
        submitter.join()
        assert tasks.count == count_at_close and not asyncio.all_tasks(tasks.events.loop)
    gc.collect()
    assert unraised_errors == []


def test_a_virtual_loop_closes_while_tasks_begin_others() -> None:
    events = VirtualEvents()
    tasks = Tasks(events)
    events.ask(lambda: events.spawn(tasks.begin(9)))
    events.let_pass(1)
    count_at_close = tasks.count
    events.close()
    assert tasks.count == count_at_close > 0 and not asyncio.all_tasks(events.loop)


def test_a_task_that_waits_for_an_answer_while_it_ends_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.utils.event_loop._AGAIN_S", 0.02)
    events = EventLoop("closed")
    ended_tasks = list[str]()

    async def wait_while_ending() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)
        finally:
            ended_tasks.append("task")

    events.submit(wait_while_ending())
    events.ask(lambda: None)
    events.close()
    assert ended_tasks == ["task"]


def test_a_task_that_swallows_its_cancellation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.utils.event_loop._END_S", 0.05)
    monkeypatch.setattr("rlctl.utils.event_loop._AGAIN_S", 0.02)
    events = EventLoop("closed")
    is_over = False

    async def swallow_cancellation() -> None:
        while not is_over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    events.submit(swallow_cancellation())
    events.ask(lambda: None)
    message = r"^1 tasks of the event loop swallow their cancellation: .*swallow_cancellation"
    with pytest.raises(RuntimeError, match=message):
        events.close()
    is_over = True


def test_a_function_asked_of_a_loop_that_closes_is_called_once_it_is_closed() -> None:
    events = EventLoop("closed")
    has_been_cancelled = threading.Event()
    is_over = threading.Event()

    async def end_late() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            with pytest.raises(RuntimeError, match=WAITS_FOR_ITSELF):
                events.ask(lambda: None)
            has_been_cancelled.set()
            while not is_over.is_set():
                await asyncio.sleep(0.001)

    events.submit(end_late())
    events.ask(lambda: None)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(events.close)
        assert has_been_cancelled.wait(5)
        answer = threads.submit(events.ask, events.loop.is_closed)
        time.sleep(0.02)
        assert not answer.done()
        is_over.set()
        assert answer.result(5)
        closing.result(5)
    assert events.ask(events.loop.is_closed)
    events.check()


@pytest.mark.parametrize("make_loop", [lambda: EventLoop("closed"), VirtualEvents])
@pytest.mark.parametrize("begin", ["submit", "run", "spawn"])
def test_a_closed_loop_refuses_a_coroutine_and_closes_it(make_loop: Callable[[], EventLoop], begin: str) -> None:
    events = make_loop()
    events.close()
    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"^the event loop is closed$"):
        getattr(events, begin)(work)
    assert getcoroutinestate(work) == CORO_CLOSED
