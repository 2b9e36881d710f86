"""A validation of weights that another algorithm trains: when engines get them, and when they rest."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.grpo.validation import SampledValidation


class CallLog:
    """Log of a validation's calls of the pool, its samples and its records, in order."""

    def __init__(self, version: int, sleeps: bool) -> None:
        self.calls: list[str] = []
        self.version = version
        self.sleeps = sleeps
        self.asleep = sleeps
        self.runner = SimpleNamespace(close=lambda: self.calls.append("runner"))
        self.dispatcher = SimpleNamespace(close=lambda: self.calls.append("dispatcher"))

    def sync(self, version: int) -> None:
        self.calls.append(f"sync {version}")
        self.version = version
        self.asleep = False

    def rest(self) -> None:
        self.calls.append("rest")
        self.asleep = True

    def groups(self, version: int, *written: Any) -> list[Any]:
        self.calls.append(f"{'record' if written else 'sample'} {version}")
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
    log: Any = CallLog(version=2, sleeps=sleeps)
    validation = SampledValidation(log, log, log, lambda rows: [])
    for version in (2, 5):
        assert validation.measure(version)["validation/prompts"] == 0
    assert log.calls == expected
    validation.close()
    assert log.calls[-2:] == ["runner", "dispatcher"]
