"""Child process that awaits one coroutine reward for many rollouts at a time, below a supervisor.

It is `python -m rlctl.rewards.coroutine_child FD`. coroutine_worker.py describes the protocol. While a
coroutine runs, its call's ticket is in memory that the parent reads too. So the parent knows which call blocks the
event loop, or ended the process.
"""

import asyncio
import contextvars
import json
import mmap
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Coroutine, Generator
from dataclasses import asdict
from functools import partial
from typing import Any

from rlctl.rewards.base import (
    Outcome,
    ReasonedValue,
    Reward,
    RewardError,
    RewardFailure,
    RewardInput,
    attempt_coroutine,
)
from rlctl.rewards.load_rewards import load_reward
from rlctl.workers.supervisor import run_guarded

# First part of a message of the parent that is an answer, and no call.
ANSWER = "answer"
# Form of the ticket in the shared memory. 0: no coroutine of a call is running.
TICKET = struct.Struct("<Q")
# Ticket of the call that a task belongs to. A task that a reward starts inherits it.
_ticket_of_task: contextvars.ContextVar[int] = contextvars.ContextVar("ticket", default=0)


class RewardLoop:
    """Event loop that awaits a reward for every call of the parent, each for at most the timeout."""

    def __init__(self, connection: socket.socket, running_ticket: mmap.mmap, reward: Reward, timeout_s: float) -> None:
        self._connection = connection
        self._running_ticket = running_ticket
        self._reward = reward
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[None]] = set()
        # Number of a question to the parent -> its answer.
        self._open_questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        if reward.connect is not None:
            reward.connect(self.ask)

    async def serve(self, requests: Any) -> None:
        """Answer calls until the parent closes the connection. requests: a file of pickled (ticket, items)."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        is_closed = asyncio.Event()

        def read_requests() -> None:
            try:
                while True:
                    first, *rest = pickle.load(requests)
                    take = self._take_answer if first == ANSWER else partial(self._begin, first)
                    loop.call_soon_threadsafe(take, *rest)
            except (EOFError, OSError):
                loop.call_soon_threadsafe(is_closed.set)

        threading.Thread(target=read_requests, name="requests", daemon=True).start()
        await is_closed.wait()

    async def ask(self, question: str, max_tokens: int, temperature: float) -> dict[str, Any]:
        """Ask the parent's model; return the answer, with `text` and tokens, or a `problem`."""
        number = secrets.randbits(63)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open_questions[number] = answer
        try:
            self._send_reply(
                {"question": question, "number": number, "max_tokens": max_tokens, "temperature": float(temperature)}
            )
            return await answer
        finally:
            del self._open_questions[number]

    def _take_answer(self, number: int, answer: dict[str, Any]) -> None:
        future = self._open_questions.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def _send_reply(self, reply: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(reply).encode() + b"\n")

    def _begin(self, ticket: int, items: list[RewardInput]) -> None:
        context = contextvars.copy_context()
        context.run(_ticket_of_task.set, ticket)
        task = asyncio.get_running_loop().create_task(self._answer_call(ticket, items), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_call(self, ticket: int, items: list[RewardInput]) -> None:
        """Await the reward for at most the timeout, and send its outcomes. A later outcome reaches nobody."""
        work = asyncio.get_running_loop().create_task(attempt_coroutine(self._reward, items))
        done, _ = await asyncio.wait({work}, timeout=self._timeout_s)
        if done:
            outcomes = work.result()
        else:
            # The coroutine may swallow its cancellation, so nothing waits for its end.
            work.cancel()
            outcomes = [late_failure(self._timeout_s)] * len(items)
        if os.getpid() != self._pid:
            os._exit(0)  # the reward forked this process, and only the parent may answer
        counts = self._reward.take_counts() if self._reward.take_counts else {}
        reply: dict[str, Any] = {
            "ticket": ticket,
            "outcomes": [_to_reply(outcome) for outcome in outcomes],
            "counts": counts,
        }
        self._send_reply(reply)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        **options: Any,
    ) -> "asyncio.Task[Any]":
        """Return a task that marks the shared memory while it runs."""

        assert isinstance(work, Coroutine)

        async def run_marked() -> Any:
            return await _MarkedSteps(work, self._running_ticket)

        return asyncio.Task(run_marked(), loop=loop, **options)


class _MarkedSteps:
    """Awaitable that runs a coroutine, and writes its ticket into the shared memory during each of its steps."""

    def __init__(self, work: Coroutine[Any, Any, Any], running_ticket: mmap.mmap) -> None:
        self._work = work
        self._running_ticket = running_ticket

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        sent: Any = None
        error: BaseException | None = None
        while True:
            TICKET.pack_into(self._running_ticket, 0, _ticket_of_task.get())
            try:
                awaited = steps.send(sent) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                TICKET.pack_into(self._running_ticket, 0, 0)
            sent = None
            error = None
            try:
                sent = yield awaited
            except BaseException as thrown:
                error = thrown


def late_failure(timeout_s: float) -> RewardFailure:
    """Return the failure of a rollout whose reward did not end in time."""
    return RewardFailure(f"took longer than {timeout_s:g} s")


def work(connection: socket.socket) -> None:
    """Load the reward, then answer calls until the parent closes the connection."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    running_ticket = mmap.mmap(descriptors[0], TICKET.size)
    requests = connection.makefile("rb")
    section, records = pickle.load(requests)
    problem = ""
    try:
        reward = load_reward(section, records)
    except RewardError as error:
        problem = str(error)
    connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    if problem:
        return
    asyncio.new_event_loop().run_until_complete(
        RewardLoop(connection, running_ticket, reward, section.timeout_s).serve(requests)
    )


def _to_reply(outcome: Outcome) -> dict[str, object]:
    if isinstance(outcome, RewardFailure):
        return {"failure": asdict(outcome)}
    if isinstance(outcome, ReasonedValue):
        return {"value": outcome.value, "reason": outcome.reason}
    return {"value": outcome}


if __name__ == "__main__":
    run_guarded(work)
