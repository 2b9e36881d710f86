"""Schemas of tools equal those that transformers derives, and each mistake in a tool gives one line."""

from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.environments.tool_schema import SchemaError, tool_schema


class Tools:
    def plain(self, x: int, name: str = "a", *, deep: bool = False) -> str:
        """Do a thing.

        Over several lines.

        Args:
            x: The number.
            name: A name
                that goes on
                over lines.

            deep: See also: nothing.

        Returns:
            A text
            of two lines.

        Raises:
            ValueError: never.
        """
        return ""

    def nothing(self) -> None:
        """Take nothing."""

    def without_hint(self):  # type: ignore[no-untyped-def]
        """Return nothing that is known."""

    async def waits(self, seconds: float) -> dict[str, Any]:
        """Wait.
        Args:
            seconds: Time in seconds.
        Returns:
            A dict.
        """
        return {}

    def wide(
        self,
        a: list[int],
        b: dict[str, float] | None,
        c: Optional[str],  # noqa: UP045
        d: int | str,
        e: Literal["up", "down"],
        f: Literal[1, "x", True],
        g: tuple[int, str],
        h: list[list[dict[str, int]]],
        i: Any,
        j: list | tuple,  # type: ignore[type-arg]
        k: Union[int, list[str], None],  # noqa: UP007
        m: list,  # type: ignore[type-arg]
        n: dict,  # type: ignore[type-arg]
        o: "int",
        p: Callable,  # type: ignore[type-arg]
        q: str = "tea",
    ) -> list[int]:
        """Take everything.

        Args:
            a: a
            b: b
            c: c (choices: ["one", " two "])
            d: d
            e: e
            f: f
            g: g
            h: h
            i: i
            j: j
            k:
                on its own line
            m: m
            n: n
            o: o
            p: p
            q: Drink (Choices: ["tea", "coffee"])
        """
        return []

    @classmethod
    def of_class(cls, x: int) -> int:
        """Be of the class. Args: are not here

        Args:
            x: The number.
        """
        return x


TOOLS = [Tools.plain, Tools.nothing, Tools.without_hint, Tools.waits, Tools.wide, Tools.of_class, Tools().plain]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__qualname__)
def test_a_schema_is_that_of_transformers(tool: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    assert tool_schema(tool) == get_json_schema(tool)


LINES = st.lists(
    st.sampled_from(
        [
            "Do it.",
            "",
            "Args:",
            "  Args:",
            "Returns:",
            "Raises:",
            "    x: first",
            "x: 1",
            "    y: no",
            "more",
            "a: b: c",
        ]
    ),
    max_size=10,
)


@given(LINES)
def test_any_docstring_is_read_as_transformers_reads_it(lines: list[str]) -> None:
    from transformers.utils import get_json_schema

    def tool(x: int) -> int:
        return x

    tool.__doc__ = "Say.\n" + "\n".join(lines)
    try:
        expected = get_json_schema(tool)
    except Exception:
        with pytest.raises(SchemaError):
            tool_schema(tool)
    else:
        assert tool_schema(tool) == expected


def no_doc(x: int) -> None: ...


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    """Say.

    Args:
        x: The number.
    """


def no_description(x: int, y: int) -> None:
    """Say.

    Args:
        x: The number.
    """


def odd_hint(x: tuple[int, ...]) -> None:
    """Say.

    Args:
        x: The numbers.
    """


def odd_choices(x: str) -> None:
    """Say.

    Args:
        x: A drink (choices: tea, coffee)
    """


def one_choice(x: int) -> None:
    """Say.

    Args:
        x: A number (choices: 5)
    """


def odd_literal(x: Literal[b"up"]) -> None:
    """Say.

    Args:
        x: A way.
    """


def unknown_hint(x: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821
    """Say.

    Args:
        x: The number.
    """


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (no_doc, "no docstring"),
        (no_hint, "parameter x has no type hint"),
        (no_description, "parameter y has no description: add a line `y: ...`"),
        (odd_hint, "parameter x: tuple[int, ...] has no JSON type: use list"),
        (odd_choices, "parameter x: (choices: ...) must be a JSON list"),
        (one_choice, "parameter x: (choices: ...) must be a JSON list: it is 5"),
        (odd_literal, "parameter x: b'up' of typing.Literal[b'up'] has no JSON type: use text"),
        (unknown_hint, "cannot be read: NameError: name 'Nowhere' is not defined"),
    ],
)
def test_a_mistake_has_a_line_that_names_the_parameter(tool: Callable[..., Any], message: str) -> None:
    with pytest.raises(SchemaError) as error:
        tool_schema(tool)
    assert message in str(error.value) and "\n" not in str(error.value)
