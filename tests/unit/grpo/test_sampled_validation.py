"""A validation of weights that another algorithm trains: when engines get them, and when they rest."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.grpo.validation import SampledValidation


class Told:
    """The validation's calls of the pool, its samples and its records, in order."""

    def __init__(self, version: int, sleeps: bool) -> None:
        self.said: list[str] = []
        self.version, self.sleeps, self.asleep = version, sleeps, sleeps
        self.runner = SimpleNamespace(close=lambda: self.said.append("runner"))
        self.dispatcher = SimpleNamespace(close=lambda: self.said.append("dispatcher"))

    def sync(self, version: int) -> None:
        self.said.append(f"sync {version}")
        self.version, self.asleep = version, False

    def rest(self) -> None:
        self.said.append("rest")
        self.asleep = True

    def groups(self, version: int, *written: Any) -> list[Any]:
        self.said.append(f"{'record' if written else 'sample'} {version}")
        return []


@pytest.mark.parametrize(
    ("sleeps", "expected"),
    [
        (False, ["sample 2", "record 2", "sync 5", "sample 5", "record 5"]),
        (True, ["sync 2", "sample 2", "rest", "record 2", "sync 5", "sample 5", "rest", "record 5"]),
    ],
    ids=["apart", "shared GPUs"],
)
def test_engines_get_the_weights_that_are_measured_and_rest_where_they_are_in_the_way(
    sleeps: bool, expected: list[str]
) -> None:
    told: Any = Told(version=2, sleeps=sleeps)
    validation = SampledValidation(told, told, told, lambda rows: [])
    for version in (2, 5):
        assert validation.measure(version)["validation/prompts"] == 0
    assert told.said == expected
    validation.close()
    assert told.said[-2:] == ["runner", "dispatcher"]
