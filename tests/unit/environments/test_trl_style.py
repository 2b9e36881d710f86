"""A file that was written for TRL's contract runs unchanged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import ToolCall
from rlctl.utils.user_code import place_of

COUNTER = Path(__file__).parent / "trl_style/counter.py"
ECHO = Path(__file__).parent / "trl_style/echo.py"
REWARDS = tuple(f"{ECHO}:{name}" for name in ("reward_func", "is_expected_text", "plain"))
SPECS = {
    "echo": EnvironmentSpec(f"{ECHO}:EchoToolEnv", 30.0, rewards=REWARDS),
    "batch": EnvironmentSpec(f"{ECHO}:EchoToolEnv", 30.0, rewards=(f"{ECHO}:batch",)),
    "state": EnvironmentSpec(f"{ECHO}:EchoToolEnv", 30.0, rewards=(f"{ECHO}:needs_state",)),
    "self_sampling": EnvironmentSpec(f"{COUNTER}:SelfSampling", 30.0),
    "row": EnvironmentSpec(f"{COUNTER}:FromRow", 30.0),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(SPECS, memory_mib=1024, processes=1) as pool:
        yield pool


def test_its_methods_are_tools_with_schemas(pool: EnvironmentPool) -> None:
    contracts = pool.contracts()
    names = [tool["function"]["name"] for tool in contracts["self_sampling"].tools]
    assert names == ["increment", "peek"]
    assert contracts["row"].tools[0]["function"]["parameters"]["required"] == ["step"]


def test_a_group_has_one_task_although_each_rollout_draws_its_own(pool: EnvironmentPool) -> None:
    row = {"environment": "self_sampling", "prompt": "Play."}
    resets = [pool.reset(("drawn", index), row, seed=index // 8).result() for index in range(16)]
    assert len(set(resets[:8])) == len(set(resets[8:])) == 1
    assert resets[0] != resets[8]


def test_tools_answer_and_errors_go_to_the_model(pool: EnvironmentPool) -> None:
    row = {"environment": "self_sampling"}
    prompt = pool.reset("played", row, seed=3).result()
    target = int(str(prompt).split()[-1].rstrip("."))
    calls = [ToolCall("peek", {}), ToolCall("increment", {"step": target}), ToolCall("increment", {"step": 1})]
    assert pool.call("played", calls).result() == [
        ToolResult("peek", f"The counter is {target}.", failed=False),
        ToolResult("increment", str(target), failed=False),
        ToolResult(
            "increment", "Error: Game over.", failed=True, raised=f"raised ValueError at {place_of(str(COUNTER), 31)}"
        ),
    ]
    assert pool.reward("played").result() == 1.0
    assert pool.close("played").result() is None


def test_a_row_brings_the_task_and_chooses_the_environment(pool: EnvironmentPool) -> None:
    assert pool.reset("row", {"environment": "row", "prompt": "Play.", "target": 2}, seed=0).result() is None
    assert pool.call("row", [ToolCall("increment", {"step": 1})]).result() == [ToolResult("increment", "1", False)]
    assert pool.reward("row").result() == 0.0


def make_columns(expected_text: str | None) -> dict[str, Any]:
    """Return the arguments of reward functions for a rollout whose completion is `done`."""
    return {
        "expected_text": expected_text,
        "prompts": [{"role": "user", "content": "Echo."}],
        "completions": [{"role": "assistant", "content": "done"}],
    }


def test_a_documented_step_is_a_tool_and_reward_functions_get_the_instance(pool: EnvironmentPool) -> None:
    contract = pool.contracts()["echo"]
    assert [tool["function"]["name"] for tool in contract.tools] == ["step"] and not contract.has_step
    # `plain` needs no instance.
    assert contract.rewards == list(REWARDS[:2]) and contract.has_reward
    assert [note.partition(":")[0] for note in contract.notes] == ["step is a tool"]
    for expected_text, reward in (("done", 1.0), ("other", 0.0), (None, None)):
        episode = expected_text
        assert pool.reset(episode, {"environment": "echo", "prompt": "Echo."}, seed=0).result() is None
        results = pool.call(episode, [ToolCall("step", {"message": "hello"})]).result()
        assert results == [ToolResult("step", "hello", False)]
        rewards = {REWARDS[0]: 0.5}
        if reward is not None:
            rewards[REWARDS[1]] = reward
        assert pool.reward(episode, make_columns(expected_text)).result() == rewards


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("batch", "returned 2 values for 1 rollout at "),
        ("state", "no value for its parameter trainer_state at "),
    ],
)
def test_a_reward_function_that_needs_more_than_one_rollout_says_so(
    pool: EnvironmentPool, environment: str, message: str
) -> None:
    pool.reset(environment, {"environment": environment}, seed=0).result()
    failure = pool.reward(environment, make_columns("done")).result()
    assert isinstance(failure, EnvironmentFailure) and failure.kind == "contract" and message in failure.detail
