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


def make_group(*lengths: int) -> RolloutGroup:
    rollouts = []
    for index, length in enumerate(lengths):
        zeros = np.zeros(length, np.int32)
        answer = Completion(zeros, np.zeros(length, np.float32), zeros, "stop")
        rollouts.append(Rollout.from_turn(turn(0, index, [7, 8]), answer))
    return RolloutGroup(Task("a", [7, 8], "?", "!"), rollouts)


def add_score(rollout: Rollout) -> Rollout:
    """Return the rollout with a score of 1. The reward of an answer with 9 tokens fails instead."""
    has_failed = rollout.num_sampled == 9
    reward = None if has_failed else 1.0
    return replace(rollout, score=Score(reward, {"exact": reward}, None, not has_failed))


def score(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    return [RolloutGroup(group.task, [add_score(rollout) for rollout in group.rollouts]) for group in groups]


def test_it_is_a_reward_of_its_own_so_that_means_add_up_and_fails_nothing() -> None:
    rules = ["grpo.overlong.penalty_tokens=4", "grpo.overlong.penalty=2", "generation.max_new_tokens=10"]
    config = load("grpo", None, rules).config
    assert isinstance(config, GrpoConfig)
    [scored] = training_score(config, score)([make_group(6, 8, 10, 9)])
    assert [rollout.reward for rollout in scored.rollouts] == [1.0, 0.0, -1.0, None]
    assert [score.parts["overlong"] for score in scored.scores] == [0.0, -1.0, -2.0, -1.5]
    assert [score.right for score in scored.scores] == [True, True, True, False]
    metrics = reward_metrics(scored.scores[:3])
    assert metrics["reward/mean"] == metrics["reward/exact/mean"] + metrics["reward/overlong/mean"] == 0.0


def test_without_penalty_tokens_scores_are_as_they_were() -> None:
    config = load("grpo", None, []).config
    assert isinstance(config, GrpoConfig)
    assert training_score(config, score) is score
