"""The contract of an environment class: its tools, its violations, and the way of a row to `reset`."""

import functools
from typing import Any, Literal, TypedDict

import numpy as np
import pytest

from rlctl.environments.contract import (
    ContractError,
    check_observation,
    check_reward,
    check_step,
    opening_messages,
    read_contract,
    reset_arguments,
    tool_text,
)


class Counter:
    """Shaped as TRL's documentation describes an environment."""

    limit = 3

    def reset(self, target: int, **kwargs: Any) -> str | None:
        self.target = target
        self.count = 0
        return f" Count to {target}."

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: The number to add.

        Returns:
            The counter.
        """
        self.count += step
        return self.count

    def _hidden(self) -> None: ...


class Wide(Counter):
    def close(self) -> None: ...

    async def get_reward(self) -> dict[str, float]:  # type: ignore[override]
        return {"a": 1.0}

    async def look(self) -> str:
        """Look."""
        return ""

    @classmethod
    def about(cls) -> str:
        """Describe the class."""
        return ""

    @staticmethod
    def helper(x: int) -> int:
        return x

    @property
    def size(self) -> int:
        return 1


def tool_names(environment: type) -> list[str]:
    return [tool["function"]["name"] for tool in read_contract(environment, {}).tools]


def test_tools_are_the_public_methods_but_the_reserved_ones_in_alphabetical_order() -> None:
    contract = read_contract(Counter, {})
    assert (contract.name, contract.problems, contract.notes) == ("Counter", [], [])
    assert (contract.has_reward, contract.has_step) == (True, False)
    assert tool_names(Counter) == ["increment"]
    assert tool_names(Wide) == ["about", "increment", "look"]
    assert read_contract(Wide, {}).notes == ["helper is a static method, so it is no tool"]


def test_a_decorated_method_is_a_tool_by_what_it_wraps() -> None:
    class Logged:
        def reset(self) -> None: ...

        @functools.wraps(Counter.increment)
        def increment(self, *args: Any, **kwargs: Any) -> int:
            return 0

    assert read_contract(Logged, {}).tools == read_contract(Counter, {}).tools


def test_everything_that_is_wrong_is_told_at_once() -> None:
    class Broken:
        def __init__(self, size: int) -> None: ...

        def get_reward(self, completion: str) -> float:
            return 0.0

        def step(self) -> None: ...

        def move(self, where: str) -> str:
            return ""

        def look(self, how) -> str:  # type: ignore[no-untyped-def]
            """Look."""
            return ""

    contract = read_contract(Broken, {})
    assert contract.problems == [
        "cannot be made with no arguments: missing a required argument: 'size'; they are environment.args",
        "tool look: parameter how has no type hint",
        "tool move: has no docstring: the model reads it as the tool's description (a method named _... is no tool)",
        "has no method reset(self, **row): it begins each episode",
        "get_reward is called as get_reward(self): missing a required argument: 'completion'",
        "step is called as step(self, message): too many positional arguments; a tool needs a docstring, and a type "
        "and a line below `Args:` for each parameter",
    ]
    assert "cannot be made" not in str(read_contract(Broken, {"size": 3}).problems)
    assert read_contract(Counter(), {}).problems == ["must be a class, not a Counter"]


def test_what_is_missing_but_allowed_is_a_note() -> None:
    class Bare:
        def reset(self, seed: int) -> None: ...

    contract = read_contract(Bare, {})
    assert contract.problems == []
    assert [note.partition(":")[0] for note in contract.notes] == ["has no get_reward", "has neither tools nor step"]


class Square:
    pass


class Offset(TypedDict):
    rows: int


def test_a_hint_that_a_call_cannot_keep_is_a_note() -> None:
    class Board:
        def reset(self) -> None: ...

        def get_reward(self) -> float:
            return 0.0

        def move(
            self, to: Square, by: Offset, past: list[Square] | None, how: Literal["slow"], note: str = ""
        ) -> Square:
            """Move.

            Args:
                to: The square.
                by: Rows.
                past: Squares on the way.
                how: Manner.
                note: Anything.
            """
            return to

    contract = read_contract(Board, {})
    assert contract.problems == []
    assert contract.notes == [
        "tool move: parameter to: JSON has no Square: a call gives a dict",
        "tool move: parameter past: JSON has no Square: a call gives a dict",
    ]
    properties = contract.tools[0]["function"]["parameters"]["properties"]
    assert properties["to"]["type"] == properties["by"]["type"] == "object"


def test_reset_gets_the_columns_and_the_seed_where_it_takes_one() -> None:
    row = {"prompt": "p", "target": 3, "environment": "counter"}

    def reset_with_seed(target: int, seed: int) -> None: ...
    def reset_with_row(**row: Any) -> None: ...

    assert reset_arguments(Counter().reset, row, 7) == {"prompt": "p", "target": 3}
    assert reset_arguments(reset_with_seed, row, 7) == {"target": 3, "seed": 7}
    assert reset_arguments(reset_with_seed, {**row, "seed": 1}, 7) == {"target": 3, "seed": 1}
    assert reset_arguments(reset_with_row, row, 7) == {"prompt": "p", "target": 3}


def test_columns_that_reset_does_not_take_are_named_with_the_nearest() -> None:
    def reset_misspelt(traget: int, seed: int = 0) -> None: ...

    with pytest.raises(ContractError) as error:
        reset_arguments(reset_misspelt, {"target": 3, "word": "x"}, 7)
    assert str(error.value).endswith(
        "are not the row's columns: no column traget; did you mean target?; no parameter for target, word: add **row"
    )


def test_a_tool_named_nearly_as_a_reserved_method_is_asked_about() -> None:
    class Game:
        def reset(self) -> None: ...

        def reward(self) -> float:
            """Value the episode."""
            return 1.0

        def rest(self, *steps: int) -> None:
            """Rest."""

    contract = read_contract(Game, {})
    assert "reward is a tool; did you mean get_reward?" in contract.notes
    assert contract.problems == ["tool rest: parameter *steps: a call gives arguments by their names; write list[...]"]


def test_the_observation_joins_the_prompt() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Play."}]
    assert opening_messages(prompt, None) == prompt
    assert opening_messages(prompt, " Go.") == [prompt[0], {"role": "user", "content": "Play. Go."}]
    assert opening_messages([], "Go.") == [{"role": "user", "content": "Go."}]
    assert opening_messages(prompt[:1], [prompt[1]]) == prompt
    assert prompt[1]["content"] == "Play."


def test_values_are_checked_and_text_blocks_joined() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_observation(blocks) == tool_text(blocks) == "ab"
    assert check_observation([{"role": "user", "content": blocks}]) == [{"role": "user", "content": "ab"}]
    assert check_reward(True) == 1.0 and check_reward(np.float32(0.5)) == 0.5
    assert check_reward({"a": 1, "b": np.int64(2)}) == {"a": 1.0, "b": 2.0}
    assert check_step(None) is None
    assert tool_text({"a": 1}) == "{'a': 1}" and tool_text([1, 2]) == "[1, 2]" and tool_text(None) == "None"


@pytest.mark.parametrize("value", [3, [], ["text"], [{"type": "image", "image": "x"}], [{"role": "user"}], b"text"])
def test_an_observation_of_another_type_breaks_the_contract(value: object) -> None:
    with pytest.raises(ContractError):
        check_observation(value)


@pytest.mark.parametrize(
    "value",
    [None, "1", float("nan"), {}, {"a": None}, {1: 1.0}, {"a": 1e308, "b": 1e308}, {"a" * 101: 1.0}, {"a\n": 1.0}],
)
def test_a_reward_that_is_no_number_breaks_the_contract(value: object) -> None:
    with pytest.raises(ContractError):
        check_reward(value)
