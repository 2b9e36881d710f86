"""A loop on virtual time ends its tasks when it is closed, as the one with a thread does."""

import asyncio
from inspect import CORO_CLOSED, getcoroutinestate

from tests.virtual_events import VirtualEvents


def test_a_closed_loop_has_ended_its_tasks_also_those_that_never_began() -> None:
    events = VirtualEvents()
    told = list[str]()

    async def waits() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            told.append("ended")

    works = [waits(), waits()]
    tasks = [events.ask(lambda work=work: events.spawn(work)) for work in works[:1]]  # type: ignore[misc]
    events.let_pass(1)
    tasks.append(events.ask(lambda: events.spawn(works[1])))
    events.close()
    assert told == ["ended"] and all(task.cancelled() for task in tasks)
    assert [getcoroutinestate(work) for work in works] == [CORO_CLOSED] * 2
    assert events.loop.is_closed()
    events.close()
