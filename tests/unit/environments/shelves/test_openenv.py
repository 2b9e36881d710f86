"""An OpenEnv server plays the other side of an episode. Its failures are failures, and never rewards."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlctl.environments.contract import EnvironmentContract, read_contract
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentSpec, InfrastructureError, ToolResult
from rlctl.environments.shelves.openenv import OpenEnv
from rlctl.environments.shelves.served_tools import add_served_tools
from rlctl.environments.tool_formats import ToolCall
from tests.unit.environments.pools import failure_of
from tests.unit.environments.shelves.openenv_server import BOARD, MCP, TEXT, served


@contextmanager
def open_pool(url: str, **args: Any) -> Iterator[EnvironmentPool]:
    spec = EnvironmentSpec("openenv", 20.0, {"url": url, **args})
    with EnvironmentPool({"openenv": spec}, 2048, 1) as pool:
        yield pool


def begin(pool: EnvironmentPool, episode: str, seed: int = 7, **row: Any) -> Any:
    return pool.reset(episode, row, seed).result()


def contract_of(**arguments: Any) -> EnvironmentContract:
    return add_served_tools(read_contract(OpenEnv, arguments), OpenEnv, arguments)


def call(pool: EnvironmentPool, episode: str, name: str, **arguments: Any) -> ToolResult:
    (result,) = pool.call(episode, [ToolCall(name, arguments)]).result()
    assert isinstance(result, ToolResult)
    return result


def test_an_action_of_one_text_field_takes_the_models_message() -> None:
    with served(TEXT) as url, open_pool(url) as pool:
        (contract,) = pool.contracts().values()
        assert (contract.tools, contract.has_step, contract.problems) == ([], True, [])
        assert begin(pool, "a") == "seed 7" == begin(pool, "b")
        assert pool.step("a", "x").result() == "1" and pool.step("a", "xx").result() is None
        # The rewards of two steps are added, that of the reset is not. Episode b has earned nothing yet.
        assert (pool.reward("a").result(), pool.reward("b").result()) == (1.5, 0.0)
        assert pool.close("a").result() is None
        begin(pool, "c", breaks=True)
        failure = failure_of(pool.step("c", "x").result())
        assert failure.detail.endswith("failed to step (EXECUTION_ERROR): the board is gone")


def test_a_servers_tools_are_the_models_tools() -> None:
    with served(MCP) as url, open_pool(url) as pool:
        (contract,) = pool.contracts().values()
        assert [tool["function"]["name"] for tool in contract.tools] == ["add"]
        begin(pool, "a")
        assert call(pool, "a", "add", n=3) == ToolResult("add", "3", failed=False)
        assert call(pool, "a", "add").content == "Error: n is missing"
        assert call(pool, "a", "reset").content.startswith("Error: there is no tool 'reset'")
        assert pool.reward("a").result() == 1.0 and pool.step("a", "done").result() is None
        # The model does not read the failure of a server, as it reads a tool's.
        for column in ("leaves", "breaks"):
            begin(pool, column, **{column: True})
            assert failure_of(pool.call(column, [ToolCall("add", {"n": 1})]).result()).kind == "raised"


def test_an_action_of_several_fields_is_a_tool() -> None:
    async def play(url: str) -> None:
        game = OpenEnv(url)
        await game.reset(seed=7)
        with pytest.raises(ValueError, match="x is no integer"):
            await game.act(x="no")
        assert await game.act(x=1) == '{"board": [1], "turn": "black"}'
        assert await game.act(x=1) == "The episode is over."
        assert game.get_reward() == 2.0
        await game.close()

    with served(BOARD) as url:
        (tool,) = contract_of(url=url).tools
        assert tool["function"]["parameters"]["required"] == ["x"]
        asyncio.run(play(url))


def test_the_last_reward_can_be_chosen_and_an_end_without_one_is_a_failure() -> None:
    async def play(url: str) -> None:
        game = OpenEnv(url, reward="last", field="text")
        await game.reset(seed=7)
        assert (await game.step("x"), await game.step("xx"), game.get_reward()) == ("1", None, 1.0)
        await game.close()
        unpaid = OpenEnv(url)
        await unpaid.reset(seed=7, ends=True)
        assert await unpaid.step("x") is None
        with pytest.raises(InfrastructureError, match="ended an episode, and gave no reward"):
            unpaid.get_reward()
        await unpaid.close()

    with served(TEXT) as url:
        asyncio.run(play(url))


def test_members_of_a_group_that_begin_differently_fail() -> None:
    async def play(url: str) -> None:
        games = [OpenEnv(url) for _ in range(3)]
        first, second, other_group = games
        await first.reset(seed=7, draws=True)
        with pytest.raises(InfrastructureError, match="two episodes of a group with different observations"):
            await second.reset(seed=7, draws=True)
        await other_group.reset(seed=8, draws=True)
        for game in games:
            await game.close()

    with served(TEXT) as url:
        asyncio.run(play(url))


def test_an_episode_waits_for_a_session_and_says_so_if_none_is_free() -> None:
    async def play(url: str) -> None:
        first, late, patient = [OpenEnv(url, wait_s=wait_s) for wait_s in (1, 0.2, 20)]
        await first.reset(seed=7)
        with pytest.raises(InfrastructureError, match=r"none of its 1 sessions was free for 0.2 s"):
            await late.reset(seed=7)
        waiting = asyncio.create_task(patient.reset(seed=7))
        await first.close()
        assert await waiting == "seed 7"
        await late.close()
        await patient.close()

    with served(TEXT, max_sessions=1) as url:
        asyncio.run(play(url))


def test_a_server_that_is_not_there_or_speaks_otherwise_is_said_before_the_start() -> None:
    with served({}) as url:
        problems = contract_of(url=url).problems
        assert problems == [f"{url}/schema describes no action: this shelf speaks the protocol of openenv 0.10"]
    (problem,) = contract_of(url="http://127.0.0.1:9").problems
    assert problem.startswith(
        "no OpenEnv server at http://127.0.0.1:9 (this shelf speaks the protocol of openenv 0.10)"
    )
    assert contract_of(url=url, reward="mean").problems == ["reward must be sum or last, not mean"]
