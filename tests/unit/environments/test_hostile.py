"""Hostile values and exceptions fail only their episode, with the reason. Other episodes in the process go on."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.messages import FunctionEnded, FunctionWaits, Sampled
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import ToolCall
from tests.unit.environments.pools import failure_of

OWN = '''
import asyncio, os, sys, tempfile

class Weird(Exception):
    def __str__(self):
        raise SystemExit(6) if self.args[0] == "exit" else ValueError("no text")

class Vault:
    def tell(self):
        return "SECRET"

class Own:
    def reset(self, value="ready", gone=False, levels=0, weird=False, **row):
        if weird:
            raise Weird("board")
        if levels:
            for _ in range(levels):
                value = [value]
            return [{"role": "user", "content": "play", "more": value}]
        if gone:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
            raise KeyError("no such board")
        self.looked = 0
        self.secret = Vault().tell
        return value

    async def wait(self, name: str) -> str:
        """Wait for a file.

        Args:
            name: Name of the file.
        """
        open(f"{name}-waits", "w").close()
        while not os.path.exists(name):
            await asyncio.sleep(0.01)
        return "waited"

    async def end(self, how: str) -> str:
        """End the process or its event loop.

        Args:
            how: Way to end it.
        """
        async def raise_exit():
            raise SystemExit(5)

        loop = asyncio.get_running_loop()
        if how == "raise":
            raise SystemExit(5)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "task":
            await asyncio.create_task(raise_exit())
        if how == "left task":
            loop.left_task = loop.create_task(raise_exit())
        if how == "callback":
            loop.call_soon(sys.exit, 5)
        if how == "stop":
            loop.stop()
        await asyncio.sleep(0.05)
        return "went on"

    def odd(self, message: str) -> str:
        """Raise.

        Args:
            message: Argument of the exception.
        """
        raise Weird(message)

    @property
    def tempting(self):
        self.looked += 1
        return self.echo

    def get_reward(self):
        return float(self.looked)

    def echo(self, value: object) -> object:
        """Return the value.

        Args:
            value: Anything.
        """
        return value
'''
PLAY = """
async def play(task, policy):
    if task.row:
        raise SystemExit(3)
    await policy.sample(task.tokens)
    return 1.0
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvironmentPool]:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with EnvironmentPool({"own": EnvironmentSpec("own.py:Own", 60.0)}, 2048, 1) as pool:
        assert pool.reset("neighbour", {}, 1).result() == "ready"
        yield pool
        assert pool.call("neighbour", [ToolCall("echo", {"value": 1})]).result() == [ToolResult("echo", "1", False)]
        pool.check()


def nest_lists(levels: int) -> Any:
    """Return the number 1 inside `levels` lists."""
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]
    return nested


def test_a_value_that_no_pickle_takes_fails_its_own_episode(pool: EnvironmentPool) -> None:
    assert pool.reset("a", {}, 1).result() == "ready"
    failure = failure_of(pool.call("a", [ToolCall("echo", {"value": nest_lists(700)})]).result(30))
    assert str(failure) == "call was given a value that cannot be sent: RecursionError"
    assert failure_of(pool.reset("b", {"value": nest_lists(700)}, 1).result(30)).kind == "contract"


@pytest.mark.parametrize("name", ["secret", "tempting", "looked", "reset", "get_reward", "__init__", "Own", ""])
def test_only_the_tools_of_the_contract_can_be_called(pool: EnvironmentPool, name: str) -> None:
    assert pool.reset("a", {}, 1).result() == "ready"
    (result,) = pool.call("a", [ToolCall(name, {})]).result()
    assert result == ToolResult(
        name, f"Error: there is no tool {name!r}; the tools are echo, end, odd, wait", failed=True
    )
    assert pool.reward("a").result() == 0.0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "call raised SystemExit"),
        ("interrupt", "call raised KeyboardInterrupt"),
        ("task", "call raised SystemExit"),
        ("left task", "went on"),
        ("callback", "went on"),
        ("stop", "went on"),
    ],
)
def test_a_coroutine_that_ends_the_process_costs_its_own_episode_alone(
    pool: EnvironmentPool, how: str, message: str
) -> None:
    waiting_call = pool.call("neighbour", [ToolCall("wait", {"name": "go"})])
    assert pool.reset("a", {}, 1).result() == "ready"
    while not Path("go-waits").exists():
        time.sleep(0.01)
    outcome = pool.call("a", [ToolCall("end", {"how": how})]).result(30)
    text = str(outcome) if isinstance(outcome, EnvironmentFailure) else outcome[0].content
    assert message in text
    Path("go").touch()
    assert waiting_call.result(30) == [ToolResult("wait", "waited", False)]


def test_a_function_that_ends_the_process_costs_its_own_rollout_alone(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    task = {"id": "r0", "prompt": "", "tokens": [1], "answer": None}
    spec = EnvironmentSpec(f"{tmp_path}/play.py:play", 60.0, is_function=True)
    with EnvironmentPool({"rollout": spec}, 2048, 1) as pool:
        assert pool.begin("neighbour", {**task, "row": {}}, 0).result() == FunctionWaits([[1]], 0)
        assert "raised SystemExit at" in str(failure_of(pool.begin("a", {**task, "row": {"end": 1}}, 0).result(30)))
        outcome = pool.resume("neighbour", [Sampled([2], [-1.0], [0])], waits=False).result(30)
        assert outcome == FunctionEnded(1, 1.0)


@pytest.mark.parametrize("levels", [70, 960, 5000])
def test_an_observation_that_is_nested_too_deep_fails_its_own_episode(pool: EnvironmentPool, levels: int) -> None:
    failure = failure_of(pool.reset("a", {"levels": levels}, 1).result(30))
    assert str(failure) == (
        "reset broke the contract: reset must return messages of at most 64 levels of lists and dicts"
    )
    assert isinstance(pool.reset("b", {"levels": 40}, 1).result(), list)


def test_an_exception_without_a_text_is_told_as_what_it_is(pool: EnvironmentPool) -> None:
    failure = failure_of(pool.reset("a", {"weird": True}, 1).result(30))
    assert str(failure) == "reset raised Weird at own.py:15: its __str__ raised ValueError"
    assert pool.reset("b", {}, 1).result() == "ready"
    for message in ("any", "exit"):
        (result,) = pool.call("b", [ToolCall("odd", {"message": message})]).result(30)  # type: ignore[misc]
        assert (result.content, result.failed) == ("Error: Weird", True)


HINT = '''class Own:
    def reset(self): ...
    def tool(self, a: "raise_weird()"):
        """Do.

        Args:
            a: A.
        """
def raise_weird():
    raise Weird
'''


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise Weird", "cannot import: Weird: its __str__ raised ValueError at broken.py:4"),
        (HINT, "tool tool: its type hints cannot be read: Weird: its __str__ raised ValueError"),
    ],
)
def test_a_class_whose_exception_has_no_text_is_told(tmp_path: Path, code: str, message: str) -> None:
    exception = "class Weird(Exception):\n    def __str__(self):\n        raise ValueError\n"
    (tmp_path / "broken.py").write_text(exception + code)
    with EnvironmentPool({"own": EnvironmentSpec(f"{tmp_path}/broken.py:Own", 60.0)}, 2048, 1) as pool:
        with pytest.raises(UnusableEnvironmentError) as error:
            pool.contracts()
        assert message in str(error.value).replace(f"{tmp_path}/", "")


def test_a_failure_whose_place_cannot_be_told_is_told(pool: EnvironmentPool) -> None:
    assert "KeyError" in str(failure_of(pool.reset("a", {"gone": True}, 1).result(30)))


def test_an_error_of_the_pools_own_is_raised_to_whoever_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_defect(self: Any, deep: bool) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr("rlctl.environments.environment_process.EnvironmentProcess.check_memory", raise_defect)
    (tmp_path / "own.py").write_text(OWN)
    with EnvironmentPool({"own": EnvironmentSpec(f"{tmp_path}/own.py:Own", 60.0)}, 2048, 1) as pool:
        pool.contracts()
        with pytest.raises(LookupError, match="a defect"):
            for _ in range(1000):
                pool.check()
                pool.reset(object(), {}, 1).result()
