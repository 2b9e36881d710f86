"""An asyncio event loop on a separate thread. Other threads call into the loop with a deadline (contract 8)."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

Value = TypeVar("Value")
# The default deadline for an answer of the loop. The loop exceeds it only if something blocks it.
ANSWER_S = 300.0
# `close` waits this long for cancelled tasks to end. Only a defect takes longer.
_END_S = 10.0
# `close` cancels tasks again at this interval, because a task may begin another wait while it ends.
_AGAIN_S = 1.0
WAITS_FOR_ITSELF = "the event loop waits for itself: only other threads may enter it"
CLOSED = "the event loop is closed"


class EventLoop:
    """An event loop that runs until `close`. Code that runs on the loop must not block.

    The first unexpected error of a task is kept, and `check` raises it. Otherwise an error in a task that nobody awaits
    would be lost.
    """

    def __init__(self, name: str) -> None:
        self._adopt(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the initial state around a new loop."""
        self.loop = loop
        # Tasks of `spawn` that have not ended.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._defect: BaseException | None = None
        # Held by `submit` and at the begin of `close`: a coroutine is either refused, or becomes a task that `close`
        # cancels.
        self._lock = threading.Lock()
        # True as soon as `close` has begun.
        self._closes = False
        # The thread that calls `close`. The last tasks run on this thread.
        self._closer: threading.Thread | None = None
        # Set when `close` has ended.
        self._closed = threading.Event()
        loop.set_exception_handler(lambda _, context: self._note_defect(context.get("exception")))

    def now(self) -> float:
        """Return the seconds of the loop's clock, which never goes back."""
        return self.loop.time()

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of `function` on the loop, from any thread. After `close`, do nothing."""
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self.loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], Value]) -> Value:
        """Call a function on the loop and return its value, from another thread. Raises the errors of `run`.

        If `close` has begun, wait until `close` has ended, then call the function on the caller's thread.
        """
        has_begun = False

        async def call_function() -> Value:
            nonlocal has_begun
            has_begun = True
            return function()

        if not self._closes:
            try:
                return self.run(call_function())
            except RuntimeError:
                # Raise the function's own error, and an error of `run`. If `close` began before the function, continue
                # below.
                if has_begun or not self._closes:
                    raise
        # These threads would wait for themselves: `close` ends on them.
        if not self._closed.is_set() and threading.current_thread() in (self._thread, self._closer):
            raise RuntimeError(WAITS_FOR_ITSELF)
        if not self._closed.wait(ANSWER_S):
            raise no_answer(ANSWER_S)
        return function()

    def submit(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Start a coroutine on the loop, from any thread, and return its future. `check` raises its error.

        Raises RuntimeError if `close` has begun.
        """
        with self._lock:
            if self._closes:
                raise refusal(work, CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        # Note the error here, because the caller may never ask the future for its result.
        future.add_done_callback(lambda done: None if done.cancelled() else self._note_defect(done.exception()))
        return future

    def run(self, work: Coroutine[Any, Any, Value], deadline_s: float = ANSWER_S) -> Value:
        """Run a coroutine on the loop and return its value, from another thread.

        Raises RuntimeError at the deadline or if `close` has begun, and CancelledError if `close` cancels the work.
        """
        if threading.current_thread() is self._thread:
            raise refusal(work, WAITS_FOR_ITSELF)
        future = self.submit(work)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            # The work itself raised TimeoutError.
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise no_answer(deadline_s) from None

    def spawn(self, work: Coroutine[Any, Any, Value]) -> "asyncio.Task[Value]":
        """Start a task, on the loop's thread. The caller need not await the task: `check` raises its error.

        Raises RuntimeError after `close`. While `close` runs, the task is cancelled before its first step.
        """
        if self.loop.is_closed():
            raise refusal(work, CLOSED)
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    async def in_thread(self, name: str, function: Callable[[], Value]) -> Value:
        """Call a blocking function on a new thread, and await its value. Cancelling does not end the thread."""
        ended: Future[Value] = Future()

        def work() -> None:
            try:
                ended.set_result(function())
            except Exception as error:
                ended.set_exception(error)
            except BaseException as error:  # for example SystemExit, which would end the whole loop if a task raised it
                failure = RuntimeError(f"a thread ended by {type(error).__name__}")
                failure.__cause__ = error
                ended.set_exception(failure)

        threading.Thread(target=work, name=name, daemon=True).start()
        await done(ended)
        return ended.result()

    def check(self) -> None:
        """Raise the first unexpected error of a task or callback, if there was one."""
        if isinstance(self._defect, Exception):
            raise self._defect
        if self._defect:
            raise RuntimeError(f"a task ended by {type(self._defect).__name__}") from self._defect

    def close(self) -> None:
        """Cancel tasks until none is left, and end the loop's thread. No coroutine starts afterwards.

        Raises RuntimeError if tasks swallow their cancellation. The loop is closed then too.
        """
        with self._lock:
            if self._closes:
                return
            self._closer = threading.current_thread()
            self._closes = True
        try:
            # The loop's thread ends, and the loop runs on this thread until the last task has ended.
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
        """Cancel all other tasks until they end; return the tasks that have not ended after 10 s."""
        end = self.now() + _END_S
        self._cancel_tasks()
        while (tasks := self._other_tasks()) and self.now() < end:
            await asyncio.wait(tasks, timeout=_AGAIN_S)
            self._cancel_tasks()
        return tasks

    def _other_tasks(self) -> "set[asyncio.Task[Any]]":
        return asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}

    def _cancel_tasks(self) -> None:
        """Cancel all other tasks. From now on also cancel each new task, because a task may start others as it ends."""

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
        except BaseException as error:  # for example SystemExit, which asyncio does not catch
            self._note_defect(error)

    def _forget_task(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._note_defect(task.exception())

    def _note_defect(self, error: BaseException | None) -> None:
        self._defect = self._defect or error


def refusal(work: Coroutine[Any, Any, Any], reason: str) -> RuntimeError:
    """Return the error for a coroutine that cannot start, and close the coroutine.

    Otherwise Python would warn that the coroutine was never awaited.
    """
    work.close()
    return RuntimeError(reason)


def no_answer(deadline_s: float) -> RuntimeError:
    """Return the error for a loop that has not answered within `deadline_s` seconds."""
    return RuntimeError(f"the event loop did not answer for {deadline_s:.0f} s: something blocks it")


async def done(future: "Future[Any]") -> None:
    """Wait until a future of another thread is done. Cancelling the wait does not cancel the future."""
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
    """Wait until `event` is set, at most for `seconds`; return True if it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
