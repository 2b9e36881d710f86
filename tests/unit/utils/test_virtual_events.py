"""A loop on virtual time ends its tasks when it is closed, as the one with a thread does."""

import asyncio
from inspect import CORO_CLOSED, getcoroutinestate

from tests.virtual_events import VirtualEvents


def test_a_closed_loop_has_ended_its_tasks_also_those_that_never_began() -> None:
    events = VirtualEvents()
    ended_tasks = list[str]()

    async def wait() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            ended_tasks.append("task")

    running = wait()
    not_begun = wait()
    running_task = events.ask(lambda: events.spawn(running))
    events.let_pass(1)
    task_not_begun = events.ask(lambda: events.spawn(not_begun))
    events.close()
    assert ended_tasks == ["task"]
    assert running_task.cancelled() and task_not_begun.cancelled()
    assert getcoroutinestate(running) == getcoroutinestate(not_begun) == CORO_CLOSED
    assert events.loop.is_closed()
    events.close()
