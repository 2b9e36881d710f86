"""Hostile values and exceptions cost their own episode, with the reason: nothing is lost, and no neighbour pays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.tool_calls import ToolCall

OWN = '''
import asyncio, os, sys, tempfile

class Vault:
    def tell(self):
        return "SECRET"

class Own:
    def reset(self, value="ready", gone=False, **row):
        if gone:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
            raise KeyError("no such board")
        self.looked, self.secret = 0, Vault().tell
        return value

    @property
    def tempting(self):
        self.looked += 1
        return self.echo

    def get_reward(self):
        return float(self.looked)

    def echo(self, value: object) -> object:
        """Return it.

        Args:
            value: Anything.
        """
        return value
'''


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvironmentPool]:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with EnvironmentPool({"own": EnvironmentSpec("own.py:Own", 60.0)}, 2048, 1) as pool:
        assert pool.reset("neighbour", {}, 1).result() == "ready"
        yield pool
        assert pool.call("neighbour", [ToolCall("echo", {"value": 1})]).result() == [ToolResult("echo", "1", False)]
        pool.check()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def failed(outcome: object) -> EnvironmentFailure:
    assert isinstance(outcome, EnvironmentFailure), outcome
    return outcome


def test_a_value_that_no_pickle_takes_fails_its_own_episode(pool: EnvironmentPool) -> None:
    assert pool.reset("a", {}, 1).result() == "ready"
    failure = failed(pool.call("a", [ToolCall("echo", {"value": nested(700)})]).result(30))
    assert str(failure) == "call was given a value that cannot be sent: RecursionError"
    assert failed(pool.reset("b", {"value": nested(700)}, 1).result(30)).kind == "contract"


@pytest.mark.parametrize("name", ["secret", "tempting", "looked", "reset", "get_reward", "__init__", "Own", ""])
def test_only_the_tools_of_the_contract_can_be_called(pool: EnvironmentPool, name: str) -> None:
    assert pool.reset("a", {}, 1).result() == "ready"
    (result,) = pool.call("a", [ToolCall(name, {})]).result()
    assert result == ToolResult(name, f"Error: there is no tool {name!r}; the tools are echo", failed=True)
    assert pool.reward("a").result() == 0.0


def test_a_failure_whose_place_cannot_be_told_is_told(pool: EnvironmentPool) -> None:
    assert "KeyError" in str(failed(pool.reset("a", {"gone": True}, 1).result(30)))


def test_an_error_of_the_pools_own_is_raised_to_whoever_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, deep: bool) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr("rlctl.environments.process.EnvironmentProcess.check_memory", broken)
    (tmp_path / "own.py").write_text(OWN)
    with EnvironmentPool({"own": EnvironmentSpec(f"{tmp_path}/own.py:Own", 60.0)}, 2048, 1) as pool:
        pool.contracts()
        with pytest.raises(LookupError, match="a defect"):
            for _ in range(1000):
                pool.check()
                pool.reset(object(), {}, 1).result()
