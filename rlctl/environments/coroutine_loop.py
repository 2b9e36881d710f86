"""Event loop of a process of environments: coroutines of all episodes, with a count of the callbacks of each."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import cached_property
from typing import Any, TypeVarTuple, Unpack

Given = TypeVarTuple("Given")


class CallbackCount:
    """Number of callbacks that an event loop was given by one episode and its tasks, so far."""

    def __init__(self) -> None:
        self.count = 0


# Set in the context of a rollout function, and so of all tasks that it begins.
counted_by: ContextVar[CallbackCount | None] = ContextVar("callbacks of the episode", default=None)


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop that counts callbacks by episode, to tell when a function waits for something from outside."""

    def call_soon(
        self, callback: Callable[[Unpack[Given]], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        counter = counted_by.get() if context is None else context.get(counted_by)
        if counter is not None:
            counter.count += 1
        return super().call_soon(callback, *args, context=context)


class CoroutineLoop:
    """The event loop of the process, on a thread that starts with the first coroutine."""

    @cached_property
    def running(self) -> asyncio.AbstractEventLoop:
        loop = CountingLoop()
        threading.Thread(target=self._run_forever, args=(loop,), name="coroutines", daemon=True).start()
        return loop

    @staticmethod
    def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop to the end of the process. One episode may stop it, or raise SystemExit or KeyboardInterrupt:
        others go on."""
        while not loop.is_closed():
            with suppress(BaseException):  # a task that raised keeps its error
                loop.run_forever()

    def gather(self, coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the result or exception of each, awaited side by side."""

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(all_of_them(), self.running).result()
