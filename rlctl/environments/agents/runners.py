"""Agents that are functions: each call has its own thread."""

import asyncio
import inspect
import json
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.environments import seeding
from rlctl.environments.agents.episode import Ended
from rlctl.environments.agents.news import AgentTask
from rlctl.environments.episode import attempted
from rlctl.utils.user_code import shortened

Agent = Callable[[AgentTask, str, str], Any]


def read_agent(function: Any) -> list[str]:
    """Return the reasons why a function cannot be called as `run(task, base_url, api_key)`."""
    name = str(getattr(function, "__name__", function))
    if not callable(function):
        return [f"must be `def run(task, base_url, api_key)`, not a {type(function).__name__}"]
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        return [f"is called as {shortened(name)}(task, base_url, api_key): {error}"]
    return []


def announce(task: AgentTask, base_url: str, api_key: str) -> None:
    """Write the address and the key into the file that the row names, and wait for ever: a person's client asks."""
    Path(task.row["file"]).write_text(json.dumps({"base_url": base_url, "api_key": api_key}))
    threading.Event().wait()


def start_function(
    function: Agent,
    loop: asyncio.AbstractEventLoop,
    task: AgentTask,
    base_url: str,
    api_key: str,
    generator: random.Random,
    ended: Ended,
) -> Callable[[], None]:
    """Call a function in its own thread: one that blocks holds up no other. A coroutine gets an event loop there.

    loop: `ended` is called on it. Returns the way to stop it, which can only cut off its session.
    """

    def call() -> Any:
        value = function(task, base_url, api_key)
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    def run() -> None:
        seeding.use(generator)
        name = str(getattr(function, "__name__", "agent"))
        outcome = attempted(name, call, function, __file__)
        with suppress(RuntimeError):  # the process is about to end
            loop.call_soon_threadsafe(ended, outcome)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return lambda: None
