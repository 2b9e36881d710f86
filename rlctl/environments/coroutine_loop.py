"""Event loop of an environment process: runs the coroutines of all episodes, and counts the callbacks of each."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import cached_property
from typing import Any, TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")


class CallbackCount:
    """Number of callbacks that one episode's asyncio tasks have scheduled on the event loop so far."""

    def __init__(self) -> None:
        self.callbacks = 0


# Set in the context of a rollout function. Every asyncio task that the function starts inherits the value.
callback_count: ContextVar[CallbackCount | None] = ContextVar("callbacks of the episode", default=None)


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop that counts callbacks by episode.

    While a count does not grow, the episode's function waits for something from outside, for example a sample.
    """

    def call_soon(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        count = callback_count.get() if context is None else context.get(callback_count)
        if count is not None:
            count.callbacks += 1
        return super().call_soon(callback, *args, context=context)


class CoroutineLoop:
    """The event loop of the process, on a thread that starts with the first coroutine."""

    @cached_property
    def running(self) -> asyncio.AbstractEventLoop:
        """The running loop. The first use starts its thread."""
        loop = CountingLoop()
        threading.Thread(target=self._run_forever, args=(loop,), name="coroutines", daemon=True).start()
        return loop

    @staticmethod
    def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the process ends.

        If one episode stops the loop, or raises SystemExit or KeyboardInterrupt, the loop runs on for other episodes.
        """
        while not loop.is_closed():
            with suppress(BaseException):  # the task that raised keeps the exception for its waiter
                loop.run_forever()

    def gather(self, coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines concurrently on the loop; return the result or exception of each, in order.

        Blocks the calling thread until all have ended.
        """

        async def gather_all() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(gather_all(), self.running).result()
