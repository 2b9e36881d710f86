"""Event loop of a process of environments: coroutines of all episodes, with a count of the callbacks of each."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import cached_property
from typing import Any, TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")


class CallbackCount:
    """Number of callbacks that one episode and its tasks have given to an event loop so far."""

    def __init__(self) -> None:
        self.callbacks = 0


# Set in the context of a rollout function, and so of all tasks that it begins.
callback_count: ContextVar[CallbackCount | None] = ContextVar("callbacks of the episode", default=None)


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop that counts callbacks by episode, to tell when a function waits for something from outside."""

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
        """Await coroutines side by side, and return the result or exception of each."""

        async def gather_all() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(gather_all(), self.running).result()
