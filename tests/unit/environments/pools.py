"""Opens a pool of the environment `Own`, which a test can make misbehave, and calls its episodes."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import ToolCall

# Source of the environment `Own`. The fixture `own_file` writes it.
OWN = """
import asyncio, ctypes, json, os, random, sqlite3, subprocess, sys, threading, time

def speak(line):
    for number in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{number}"
        if os.path.islink(link) and "socket" in os.readlink(link):
            os.write(int(number), line.encode() + b"\\n")

class Own:
    def __init__(self, end=None):
        if end == "exit":
            sys.exit(3)
        if end == "os._exit":
            os._exit(3)

    def reset(self, hang=False, raises=False, value="ready", **row):
        if hang:
            time.sleep(1000)
        if raises:
            raise KeyError("no such board")
        self.database = sqlite3.connect(":memory:")
        self.row = row
        return value

    def get_reward(self):
        return self.row.get("reward", 1.0)

    def step(self, message):
        if message == "wrong":
            return 3
        return None if message == "end" else message.upper()

    def close(self):
        if "closed" in self.row:
            open(self.row["closed"], "w").close()
        self.database.close()

    def select(self) -> str:
        \"\"\"Ask a database that serves the thread that opened it.\"\"\"
        return self.database.execute("select 6 * 7").fetchone()[0]

    def sleep(self, seconds: float) -> str:
        \"\"\"Sleep.

        Args:
            seconds: How long.
        \"\"\"
        time.sleep(seconds)
        return "slept"

    async def wait(self, seconds: float) -> str:
        \"\"\"Wait.

        Args:
            seconds: How long.
        \"\"\"
        await asyncio.sleep(seconds)
        return f"waited, {random.random()}"

    def _have_all_met(self, number, total):
        open(f"met-{number}", "w").close()
        return os.path.exists("go") and all(os.path.exists(f"met-{index}") for index in range(total))

    def meet(self, number: int, total: int) -> str:
        \"\"\"Wait for the others, and for the file `go`.

        Args:
            number: Index of this call.
            total: Number of calls that meet.
        \"\"\"
        while not self._have_all_met(number, total):
            time.sleep(0.01)
        return "met"

    async def meet_later(self, number: int, total: int) -> str:
        \"\"\"Wait for the others without holding a thread.

        Args:
            number: Index of this call.
            total: Number of calls that meet.
        \"\"\"
        while not self._have_all_met(number, total):
            await asyncio.sleep(0.01)
        return "met"

    def run(self, code: str) -> object:
        \"\"\"Run Python.

        Args:
            code: An expression.
        \"\"\"
        return eval(code)
"""
# Outcome of `call_select` if the episode's calls all run on the episode's thread.
SELECTED = [ToolResult("select", "42", failed=False)]


@contextmanager
def open_pool(
    processes: int = 1, memory_mib: int = 2048, args: dict[str, Any] | None = None, **options: Any
) -> Iterator[EnvironmentPool]:
    """Open a pool of `Own`. args: its constructor's. options: the pool's."""
    spec = EnvironmentSpec("own.py:Own", 120.0, args or {})
    with EnvironmentPool({"own": spec}, memory_mib, processes, **options) as pool:
        yield pool


def begin_episodes(pool: EnvironmentPool, *episodes: object, **row: Any) -> None:
    futures = [pool.reset(episode, row, seed=1) for episode in episodes]
    outcomes = [future.result() for future in futures]
    assert outcomes == ["ready"] * len(episodes)


def call_select(pool: EnvironmentPool, episode: object) -> object:
    return pool.call(episode, [ToolCall("select", {})]).result()


def run_code(pool: EnvironmentPool, episode: object, code: str) -> "Future[Any]":
    return pool.call(episode, [ToolCall("run", {"code": code})])


def failure_of(outcome: object) -> EnvironmentFailure:
    assert isinstance(outcome, EnvironmentFailure), outcome
    return outcome
