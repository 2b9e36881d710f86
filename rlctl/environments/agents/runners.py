"""Agents that are functions. Each runs on its own thread; all async functions share one event loop."""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.environments import seeding
from rlctl.environments.agents.agent_episode import AgentLaunch, AgentTask
from rlctl.environments.coroutine_loop import CoroutineLoop
from rlctl.environments.episode import run_action
from rlctl.utils.user_code import shorten_text

Agent = Callable[[AgentTask, str, str], Any]
# Event loop of all agents that are async functions.
_COROUTINES = CoroutineLoop()
# Seconds after which the start of a coroutine is late.
_LATE_S = 5.0
_late_warned = threading.Event()


def read_agent(function: Any, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Return the reasons why a function cannot be called as `run(task, base_url, api_key)`; empty if it can.

    arguments: further keyword arguments.
    """
    name = str(getattr(function, "__name__", function))
    if not callable(function):
        return [f"must be `def run(task, base_url, api_key)`, not a {type(function).__name__}"]
    try:
        inspect.signature(function).bind(None, None, None, **(arguments or {}))
    except TypeError as error:
        further = "".join(f", {argument}=..." for argument in arguments or {})
        return [f"is called as {shorten_text(name)}(task, base_url, api_key{further}): {error}; agent.args has more"]
    return []


def announce(task: AgentTask, base_url: str, api_key: str) -> None:
    """Write a session's address and key into the row's `file`, and never return: a person's client sends requests."""
    Path(task.row["file"]).write_text(json.dumps({"base_url": base_url, "api_key": api_key}))
    threading.Event().wait()


def start_function(function: Agent, launch: AgentLaunch) -> Callable[[], None]:
    """Call an agent's function in a thread, so that agents can block. Return a function that stops the agent.

    The coroutine of an async function runs on the one event loop of the process: an async client works on one loop
    only, and most SDKs keep one client a process. The returned function cancels a coroutine. It cannot end a thread:
    the thread runs on, and its session is closed.
    """
    is_stopped = threading.Event()
    # The coroutine's task once it has started; at most one.
    tasks: list[asyncio.Task[Any]] = []

    async def await_coroutine(coroutine: Coroutine[Any, Any, Any], submitted_at: float) -> Any:
        _warn_if_late(time.monotonic() - submitted_at)
        tasks.append(asyncio.ensure_future(seeding.await_using(launch.generator, coroutine)))
        if is_stopped.is_set():  # `stop` came before the task, and had nothing to cancel
            tasks[0].cancel()
        return await tasks[0]

    def call_function() -> Any:
        value = function(launch.task, launch.base_url, launch.api_key)
        if not inspect.iscoroutine(value):
            return value
        waiting = await_coroutine(value, time.monotonic())
        return asyncio.run_coroutine_threadsafe(waiting, _COROUTINES.running).result()

    def run() -> None:
        seeding.use(launch.generator)
        name = str(getattr(function, "__name__", "agent"))
        outcome = run_action(name, call_function, function, __file__)
        with suppress(RuntimeError):  # the loop is closed, because the process is about to end
            launch.loop.call_soon_threadsafe(launch.on_end, outcome)

    def stop() -> None:
        is_stopped.set()
        for task in tasks:
            _COROUTINES.running.call_soon_threadsafe(task.cancel)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return stop


def _warn_if_late(waited_s: float) -> None:
    """Print a warning if a coroutine waited longer than `_LATE_S` for the event loop. A process prints it once.

    An agent that blocks the loop, for example in `time.sleep`, delays the coroutines of all other agents.
    """
    if waited_s > _LATE_S and not _late_warned.is_set():
        _late_warned.set()
        problem = (
            f"a coroutine began {waited_s:.0f} s late: another one blocks the event loop that all of a process share"
        )
        print(f"agents: {problem}; await an async client, or write `def run`", file=sys.stderr, flush=True)
