"""Ways to run an agent: a function of the user's in a thread, or a command."""

import asyncio
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.environments import seeding
from rlctl.environments.agents.episode import Ended
from rlctl.environments.agents.news import AgentTask
from rlctl.environments.episode import attempted
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import shortened

# Seconds between SIGTERM and SIGKILL for a command's processes.
_TERM_S = 2.0
# Seconds for the rest of its output, once it has ended.
_OUTPUT_S = 1.0
# Characters of a line of a command's output that are looked at.
_MAX_LINE = 1 << 16
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


def start_command(
    command: list[str],
    loop: asyncio.AbstractEventLoop,
    task: AgentTask,
    base_url: str,
    api_key: str,
    generator: random.Random,
    ended: Ended,
) -> Callable[[], None]:
    """Start a command in its own session. Returns the way to stop it, with all that it started.

    The last line of its output is its value, if it is JSON: a number, or an object with `reward`.
    """
    root = base_url.removesuffix("/v1")
    own = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": api_key,
        "RLCTL_BASE_URL": base_url,
        "RLCTL_API_KEY": api_key,
        "RLCTL_TASK": json.dumps(asdict(task), default=str),
        "RLCTL_SEED": str(generator.getrandbits(31)),
        # These call home, or change their requests with each one, otherwise.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    name = Path(command[-1] if len(command) == 1 else command[0]).name
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        failure = EnvironmentFailure("raised", f"{name} cannot be started", str(error))
        loop.call_soon(ended, failure)
        return lambda: None

    lines: deque[bytes] = deque(maxlen=1)
    reader = threading.Thread(target=_pass_on, args=(process, lines), name="agent's output", daemon=True)

    def watch() -> None:
        code = process.wait()
        # Processes that it leaves behind may hold its output open.
        reader.join(_OUTPUT_S)
        last = lines[0].decode(errors="replace").strip() if lines else ""
        outcome: Any = _value(last)
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            outcome = EnvironmentFailure("raised", f"{name} {how}", shortened(last))
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended, outcome)
        _kill(process, signal.SIGKILL)

    reader.start()
    threading.Thread(target=watch, name="agent's end", daemon=True).start()
    return lambda: _stop(process)


def _pass_on(process: "subprocess.Popen[bytes]", kept: deque[bytes]) -> None:
    """Pass a command's output on to the log, and keep its last line that is not blank."""
    assert process.stdout is not None
    while line := process.stdout.readline(_MAX_LINE):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if line.strip():
            kept.append(line)


def _value(line: str) -> Any:
    """Return the value in a line; None if it has none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found.get("reward")
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
    return None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    _kill(process, signal.SIGTERM)
    timer = threading.Timer(_TERM_S, _kill, (process, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _kill(process: "subprocess.Popen[bytes]", with_signal: signal.Signals) -> None:
    """Send a signal to the group of a command, whose leader may have ended before its children."""
    with suppress(OSError):
        os.killpg(process.pid, with_signal)
