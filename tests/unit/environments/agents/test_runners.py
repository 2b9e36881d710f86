"""Agents that are functions: coroutines share one event loop, and a closed session cancels its own."""

import asyncio
import random
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.environments.agents import runners
from rlctl.environments.agents.agent_episode import AgentLaunch, AgentTask
from rlctl.environments.outcomes import EnvironmentFailure

TASK = AgentTask(id="r0", prompt="2+2?", messages=[], answer=None, row={})
# Stand-in for an event loop that calls functions at once.
LOOP: Any = SimpleNamespace(call_soon_threadsafe=lambda function, outcome: function(outcome))


def start_agent(function: Any) -> tuple[Any, SimpleQueue[Any]]:
    """Start an agent. Return the function that stops it, and the queue that gets its outcome."""
    outcomes = SimpleQueue[Any]()
    launch = AgentLaunch(
        task=TASK,
        base_url="",
        api_key="",
        generator=random.Random(0),
        on_end=outcomes.put,
        loop=LOOP,
    )
    return runners.start_function(function, launch), outcomes


def test_coroutines_share_a_loop_since_clients_of_asyncio_belong_to_one() -> None:
    async def loop_of(task: AgentTask, base_url: str, api_key: str) -> int:
        return id(asyncio.get_running_loop())

    queues = [start_agent(loop_of)[1] for _ in range(3)]
    assert len({queue.get(timeout=300) for queue in queues}) == 1


def test_a_coroutine_is_cancelled_when_its_session_is_closed() -> None:
    has_begun = threading.Event()

    async def waits(task: AgentTask, base_url: str, api_key: str) -> None:
        has_begun.set()
        await asyncio.sleep(600)

    stop, outcomes = start_agent(waits)
    assert has_begun.wait(20)
    stop()
    outcome = outcomes.get(timeout=300)
    assert isinstance(outcome, EnvironmentFailure) and "waits raised CancelledError" in outcome.cause


def test_a_coroutine_that_blocks_the_others_is_told_once(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(runners, "_LATE_S", 0.0)
    monkeypatch.setattr(runners, "_late_warned", threading.Event())

    async def ends(task: AgentTask, base_url: str, api_key: str) -> float:
        return 1.0

    assert [start_agent(ends)[1].get(timeout=300) for _ in range(3)] == [1.0] * 3
    assert capfd.readouterr().err.count("write `def run`") == 1
