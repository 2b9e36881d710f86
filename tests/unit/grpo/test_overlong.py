"""DAPO's soft overlong punishment."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion
from rlctl.grpo.metrics import reward_metrics
from rlctl.grpo.overlong import soft_penalty, training_score
from rlctl.preflight.load import load
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup
from tests.turns import turn


@given(st.integers(1, 300), st.integers(2, 200), st.data())
def test_the_penalty_is_that_of_the_paper(length: int, longest: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, longest - 1))
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    assert soft_penalty(length, longest, cache, 1.0) == pytest.approx(expected)
    assert soft_penalty(length, longest, cache, 0.5) == pytest.approx(expected / 2)


def group(*lengths: int) -> RolloutGroup:
    task = Task("a", [7, 8], "?", "!")
    answers = [
        Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop") for n in lengths
    ]
    return RolloutGroup(task, [Rollout.from_turn(turn(0, index, [7, 8]), one) for index, one in enumerate(answers)])


def score(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Every answer earns 1, but one of 9 tokens, whose reward fails."""
    scores = {n: Score(None if n == 9 else 1.0, {"exact": None if n == 9 else 1.0}, None, n != 9) for n in range(20)}
    return [
        RolloutGroup(each.task, [replace(one, score=scores[one.num_sampled]) for one in each.rollouts])
        for each in groups
    ]


def test_it_is_a_reward_of_its_own_so_that_means_add_up_and_fails_nothing() -> None:
    rules = ["grpo.overlong.penalty_tokens=4", "grpo.overlong.penalty=2", "generation.max_new_tokens=10"]
    config = load("grpo", None, rules).config
    assert isinstance(config, GrpoConfig)
    [scored] = training_score(config, score)([group(6, 8, 10, 9)])
    assert [one.reward for one in scored.rollouts] == [1.0, 0.0, -1.0, None]
    assert [one.parts["overlong"] for one in scored.scores] == [0.0, -1.0, -2.0, -1.5]
    assert [one.right for one in scored.scores] == [True, True, True, False]
    metrics = reward_metrics(scored.scores[:3])
    assert metrics["reward/mean"] == metrics["reward/exact/mean"] + metrics["reward/overlong/mean"] == 0.0


def test_without_penalty_tokens_scores_are_as_they_were() -> None:
    config = load("grpo", None, []).config
    assert isinstance(config, GrpoConfig)
    assert training_score(config, score) is score
