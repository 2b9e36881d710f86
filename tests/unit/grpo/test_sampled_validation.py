"""Validation of weights that another algorithm trains: when engines get the weights, and when engines sleep.

Also tests the warning about a validation in which no answer can count as right.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.grpo.validation import SampledValidation, find_unreached_accuracy
from rlctl.preflight.load import load
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup


class CallLog:
    """Stand-in for pool, validation and recorder that logs all calls in order, for example "sync 5"."""

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

    def warn_once(self, subject: str, warning: str | None) -> None:
        assert warning is None

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
    log.config = None
    validation = SampledValidation(log, log, log, lambda rows: [])
    for version in (2, 5):
        assert validation.measure(version)["validation/prompts"] == 0
    assert log.calls == expected
    validation.close()
    assert log.calls[-2:] == ["runner", "dispatcher"]


@pytest.mark.parametrize(
    ("rewards", "right", "is_warned"),
    [
        ((0.2, 0.9), (False, False), True),
        ((0.2, 1.0), (False, True), False),
        ((0.0, 0.0), (False, False), False),
        ((None, None), (False, False), False),
    ],
    ids=["never right", "one right", "equal rewards", "no score"],
)
def test_an_accuracy_that_no_answer_raises_is_told(
    rewards: tuple[float | None, ...], right: tuple[bool, ...], is_warned: bool
) -> None:
    request = TurnRequest(RequestId(RolloutId("validation", "r0", 0, 0)), [1], 4, 0.0, 0)
    numbers = np.zeros(1, np.float32)
    completion = Completion(
        tokens=np.zeros(1, np.int32), log_probs=numbers, versions=np.zeros(1, np.int32), finish="stop"
    )
    rollout = Rollout.from_turn(request, completion)
    rollouts = []
    for value, is_right in zip(rewards, right, strict=True):
        score = Score(value=value, parts={}, failed=None, right=is_right)
        rollouts.append(replace(rollout, score=score))
    groups = [RolloutGroup(Task("r0", [1], "", "2"), rollouts)]
    warning = find_unreached_accuracy(groups, load("grpo", "grpo-tiny", []).config, step=20)
    assert (warning is not None) == is_warned
    if warning:
        assert "from 0.2 to 0.9" in warning
        assert "checkpoint.metric=validation/reward" in warning
