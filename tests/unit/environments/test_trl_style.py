"""A file that was written for TRL's contract runs unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.environments.outcomes import EnvironmentSpec, ToolResult
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.tool_calls import ToolCall
from rlctl.utils.user_code import place_of

FILE = Path(__file__).parent / "trl_style/counter.py"
SPECS = {
    "self_sampling": EnvironmentSpec(f"{FILE}:SelfSampling", 30.0),
    "row": EnvironmentSpec(f"{FILE}:FromRow", 30.0),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(SPECS, memory_mib=1024, processes=1) as started:
        yield started


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
            "increment", "Error: Game over.", failed=True, raised=f"raised ValueError at {place_of(str(FILE), 31)}"
        ),
    ]
    assert pool.reward("played").result() == 1.0
    assert pool.close("played").result() is None


def test_a_row_brings_the_task_and_chooses_the_environment(pool: EnvironmentPool) -> None:
    assert pool.reset("row", {"environment": "row", "prompt": "Play.", "target": 2}, seed=0).result() is None
    assert pool.call("row", [ToolCall("increment", {"step": 1})]).result() == [ToolResult("increment", "1", False)]
    assert pool.reward("row").result() == 0.0
