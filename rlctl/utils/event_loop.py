"""An asyncio event loop on its own thread. Other threads enter it with a deadline (contract 8)."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

Value = TypeVar("Value")
# Seconds in which the loop answers another thread. Only a loop that something blocks takes longer.
ANSWER_S = 300.0
# Seconds in which cancelled tasks end. Only a defect takes longer.
_END_S = 10.0
# Seconds after which a task is cancelled again: it may wait for an answer that can no longer come.
_AGAIN_S = 1.0
WAITS_FOR_ITSELF = "the event loop waits for itself: only other threads may enter it"
CLOSED = "the event loop is closed"


class EventLoop:
    """An event loop that runs until `close`. Nothing that runs on it may block.

    An unexpected error is kept, and `check` raises it: a task that nobody awaits would lose it.
    """

    def __init__(self, name: str) -> None:
        self._adopt(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # Tasks of `spawn` that have not ended.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._defect: BaseException | None = None
        # Guards the first moment of `close`: whatever was submitted before it becomes a task, which is then cancelled.
        self._lock = threading.Lock()
        self._closes = False
        # The thread in `close`, where the last tasks end.
        self._closer: threading.Thread | None = None
        self._closed = threading.Event()
        loop.set_exception_handler(lambda _, context: self._note_defect(context.get("exception")))

    def now(self) -> float:
        """Return seconds of a clock that only advances, the loop's."""
        return self.loop.time()

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, from any thread. Do nothing after `close`."""
        with suppress(RuntimeError):  # closed meanwhile
            self.loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], Value]) -> Value:
        """Call a function on the loop and return its value, from another thread. Raises what `run` raises.

        Once `close` has begun, it waits for the end of that and calls the function here, on the caller's thread.
        """
        called = False

        async def answer() -> Value:
            nonlocal called
            called = True
            return function()

        if not self._closes:
            try:
                return self.run(answer())
            except RuntimeError:
                if called or not self._closes:
                    raise
        if not self._closed.is_set() and threading.current_thread() in (self._thread, self._closer):
            raise RuntimeError(WAITS_FOR_ITSELF)
        if not self._closed.wait(ANSWER_S):
            raise no_answer(ANSWER_S)
        return function()

    def submit(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Begin a coroutine, from any thread; return its future. Keep its error.

        Raises RuntimeError as soon as `close` has begun.
        """
        with self._lock:
            if self._closes:
                raise refusal(work, CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        # The submitter may never look at it.
        future.add_done_callback(lambda done: None if done.cancelled() else self._note_defect(done.exception()))
        return future

    def run(self, work: Coroutine[Any, Any, Value], deadline_s: float = ANSWER_S) -> Value:
        """Run a coroutine and return its value, from another thread.

        Raises RuntimeError at the deadline and from `close` on, CancelledError for work that `close` cancels.
        """
        if threading.current_thread() is self._thread:
            raise refusal(work, WAITS_FOR_ITSELF)
        future = self.submit(work)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise no_answer(deadline_s) from None

    def spawn(self, work: Coroutine[Any, Any, Value]) -> "asyncio.Task[Value]":
        """Begin a task that nobody need await, on the loop's thread. Keep its error.

        Raises RuntimeError after `close`. During it the task is cancelled before its first step.
        """
        if self.loop.is_closed():
            raise refusal(work, CLOSED)
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    async def in_thread(self, name: str, function: Callable[[], Value]) -> Value:
        """Call a function that blocks on a new thread, and await its value. Cancelled, the thread goes on."""
        ended: Future[Value] = Future()

        def work() -> None:
            try:
                ended.set_result(function())
            except Exception as error:
                ended.set_exception(error)
            except BaseException as error:  # SystemExit, say, with which a task would end the whole loop
                failure = RuntimeError(f"a thread ended by {type(error).__name__}")
                failure.__cause__ = error
                ended.set_exception(failure)

        threading.Thread(target=work, name=name, daemon=True).start()
        await done(ended)
        return ended.result()

    def check(self) -> None:
        """Raise the first unexpected error, if there was one."""
        if isinstance(self._defect, Exception):
            raise self._defect
        if self._defect:
            raise RuntimeError(f"a task ended by {type(self._defect).__name__}") from self._defect

    def close(self) -> None:
        """Cancel tasks until none is left, and end the thread. Nothing begins after that.

        Raises RuntimeError, with the loop closed, for tasks that swallow their cancellation.
        """
        with self._lock:
            if self._closes:
                return
            self._closer = threading.current_thread()
            self._closes = True
        try:
            self.call(self.loop.stop)
            self._thread.join()
            endless_tasks = self.loop.run_until_complete(self._end_tasks())
            self.loop.close()
        finally:
            self._closed.set()
        if endless_tasks:
            names = {str(getattr(task.get_coro(), "__qualname__", task)) for task in endless_tasks}
            problem = f"{len(endless_tasks):,} tasks of the event loop swallow their cancellation"
            raise RuntimeError(f"{problem}: {', '.join(sorted(names))}")

    async def _end_tasks(self) -> "set[asyncio.Task[Any]]":
        """End every other task; return those that do not end in time."""
        end = self.now() + _END_S
        self._cancel_tasks()
        while (tasks := self._other_tasks()) and self.now() < end:
            await asyncio.wait(tasks, timeout=_AGAIN_S)
            self._cancel_tasks()
        return tasks

    def _other_tasks(self) -> "set[asyncio.Task[Any]]":
        return asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}

    def _cancel_tasks(self) -> None:
        """Cancel other tasks, and from now on each new one before its first step: a task that ends may begin others."""

        def make_cancelled(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
            task = asyncio.Task(work, loop=loop, **options)
            task.cancel()
            return task

        self.loop.set_task_factory(make_cancelled)
        for task in self._other_tasks():
            task.cancel()

    def _run_loop(self) -> None:
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit, say, which asyncio lets through
            self._note_defect(error)

    def _forget_task(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._note_defect(task.exception())

    def _note_defect(self, error: BaseException | None) -> None:
        self._defect = self._defect or error


def refusal(work: Coroutine[Any, Any, Any], reason: str) -> RuntimeError:
    """Close a coroutine that cannot begin: it would warn that nobody awaited it. Return the error."""
    work.close()
    return RuntimeError(reason)


def no_answer(deadline_s: float) -> RuntimeError:
    """Return the error of a loop that did not answer in time."""
    return RuntimeError(f"the event loop did not answer for {deadline_s:.0f} s: something blocks it")


async def done(future: "Future[Any]") -> None:
    """Wait for a future of another thread. A wait that is cancelled leaves the future as it is."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(wake)
    await ended


async def wait_until_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set, at most for some seconds; return True if it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
