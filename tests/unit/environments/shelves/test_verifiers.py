"""An environment server of verifiers plays a rollout. Its trace has the rewards, and its errors are failures."""

import asyncio
from typing import Any

import pytest

from rlctl.environments.agents.agent_episode import AgentTask
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.function_trial import try_agent
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec, InfrastructureError
from rlctl.environments.shelves import verifiers
from tests.unit.environments.shelves.verifiers_server import Server, served

ROW = {"prompt": "6 * 7", "answer": "42"}


def play(server: Server, **row: Any) -> dict[str, float]:
    task = AgentTask(id="r1", prompt="", messages=[], answer=None, row={**ROW, **row})
    return asyncio.run(verifiers.run(task, "http://127.0.0.1:9", "key", address=server.address))


def test_the_server_asks_the_session_for_turns_and_its_trace_has_the_rewards() -> None:
    with served() as server:
        spec = EnvironmentSpec("verifiers", 20.0, {"address": server.address}, agent=AgentSpec())
        with EnvironmentPool({"agent": spec}, 2048, 1) as pool:
            task = {"id": "r1", "prompt": "", "messages": [], "answer": None, "row": ROW}
            right, wrong = [try_agent(pool, text, task, 0, list(text.encode()), 4) for text in ("42", "41")]
    assert (right.failure, right.reward, len(right.samples)) == (None, {"right": 2.0, "brief": 0.5}, 1)
    assert (wrong.failure, wrong.reward) == (None, {"right": 0.0, "brief": 0.5})


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("error", "the rollout failed on .*: TaskError: no checker"),
        ("repeated", "retry: the server repeated the rollout"),
        ("late", "the rollout did not complete: agent_timeout"),
        ("unscored", "the reward right has no value"),
        ("two", "has 2 traces: this shelf trains one agent alone"),
        ("newer", "a trace of version 2, of verifiers 0.9; this shelf speaks the protocol of verifiers 0.4"),
        ("refused", "played no rollout: ValidationError: no column secret"),
    ],
)
def test_a_rollout_that_has_no_value_is_a_failure(fate: str, reason: str) -> None:
    with served() as server, pytest.raises(InfrastructureError, match=reason):
        play(server, fate=fate)


def test_a_server_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_HEALTH_S", 0.2)
    monkeypatch.setattr(verifiers, "_HEALTH_PAUSE_S", 0.1)
    with served() as server:
        pass
    with pytest.raises(InfrastructureError, match="no environment server of verifiers answers at"):
        play(server)
    server.address = "nowhere"
    with pytest.raises(InfrastructureError, match="nowhere is no address of a server"):
        play(server)


def test_a_rollout_that_is_cancelled_is_cancelled_on_the_server() -> None:
    async def play_a_while(server: Server) -> None:
        task = AgentTask(id="r1", prompt="", messages=[], answer=None, row={**ROW, "fate": "never"})
        playing = asyncio.create_task(verifiers.run(task, "http://127.0.0.1:9", "key", address=server.address))
        while not server.runs:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        while not server.cancelled:
            await asyncio.sleep(0.01)

    with served() as server:
        asyncio.run(play_a_while(server))
        assert server.cancelled == server.runs
