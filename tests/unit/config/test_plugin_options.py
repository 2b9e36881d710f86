"""The keys of a user's own class: the fields that it adds, converted as strictly as rlctl's own."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlctl.config.fields import spec
from rlctl.config.plugin_options import plugin_options


@dataclass(frozen=True)
class Base:
    shared: float


@dataclass(frozen=True)
class Plugin(Base):
    beta: float = spec("A weight.", ge=0)
    kind: Literal["soft", "hard"] = "soft"
    bounds: list[float] | None = None
    names: list[str] = field(default_factory=list)


def test_values_are_converted_and_defaults_stay_in_the_class() -> None:
    values, problems = plugin_options(Plugin, Base, {"beta": 1, "bounds": [0, 2]}, "grpo.loss")
    assert (values, problems) == ({"beta": 1.0, "bounds": [0.0, 2.0]}, [])
    assert isinstance(values["beta"], float)
    assert Plugin(shared=0.5, **values).kind == "soft"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "grpo.loss.beta: not set, and Plugin has no default"),
        ({"beta": -1.0}, "grpo.loss.beta: must be at least 0, not -1.0"),
        ({"beta": "much"}, "grpo.loss.beta: must be a number, not 'much'"),
        ({"beta": 1.0, "kind": "sift"}, "grpo.loss.kind: must be one of soft, hard, not 'sift'; did you mean soft?"),
        ({"beta": 1.0, "beat": 2.0}, "grpo.loss.beat: unknown key; did you mean beta?"),
        ({"beta": 1.0, "shared": 2.0}, "grpo.loss.shared: unknown key; grpo.loss has beta, kind, bounds, names"),
    ],
)
def test_every_mistake_is_a_line(options: dict[str, Any], line: str) -> None:
    _, problems = plugin_options(Plugin, Base, options, "grpo.loss")
    assert [str(problem) for problem in problems] == [line]


def test_a_field_that_no_config_can_hold_is_named() -> None:
    @dataclass(frozen=True)
    class Odd(Base):
        table: dict[str, int] = field(default_factory=dict)

    _, [problem] = plugin_options(Odd, Base, {}, "grpo.loss")
    assert str(problem).startswith("grpo.loss.table: Odd has it as dict[str, int]: a config holds bool, int, ")
