"""Metrics of the episodes that a step's rollouts played in an environment."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion
from rlctl.grpo.metrics import environment_metrics
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import PlayedEpisode, Rollout, RolloutGroup
from tests.turns import turn


def make_rollout(
    turns: int, reward: float | None, ending: Any, calls: int = 0, errors: int = 0, tries: int = 0
) -> Rollout:
    answer = Completion(np.array([8], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    one_turn = Rollout.from_turn(turn(0), answer)
    played = PlayedEpisode([], 0, ending, turns, reward, None, tries, 0.5 * turns, calls, errors, errors, 0, errors)
    rows = [] if ending == "failed" else one_turn.rows
    return replace(one_turn, rows=rows, episode=played, score=Score(reward, {}, None, False))


def test_turns_calls_endings_and_reward_by_turns_are_of_the_episodes_that_did_not_fail() -> None:
    rollouts = [
        make_rollout(1, 1.0, "done", calls=1),
        make_rollout(3, 0.0, "max_turns", calls=3, errors=1, tries=1),
        make_rollout(3, 0.5, "done"),
        make_rollout(2, None, "failed", calls=9, tries=3),
    ]
    metrics = environment_metrics([RolloutGroup(Task("t", [], "", None), rollouts)])
    assert metrics == {
        "environment/failed": 1.0,
        "environment/retries": 1.0,
        "environment/turns": 7 / 3,
        "environment/tool_calls": 4 / 3,
        "environment/tool_errors": 0.25,
        "environment/tool_raised": 0.25,
        "environment/malformed_calls": 0.25,
        "environment/seconds": 3.5 / 3,
        "environment/rows": 1.0,
        "environment/endings/done": 2 / 3,
        "environment/endings/max_turns": 1 / 3,
        "reward/turns_1": 1.0,
        "reward/turns_3": 0.25,
    }


def test_spelled_tokens_and_unwritten_messages_are_counted_where_there_are_any() -> None:
    spells = make_rollout(1, 1.0, "done")
    assert spells.episode
    spells = replace(spells, episode=replace(spells.episode, spelled=2, unwritten=1))
    metrics = environment_metrics([RolloutGroup(Task("t", [], "", None), [spells, spells])])
    assert (metrics["environment/spelled_tokens"], metrics["environment/unwritten_messages"]) == (4.0, 2.0)


def test_a_step_all_of_whose_episodes_failed_has_nothing_else() -> None:
    failed = RolloutGroup(Task("t", [], "", None), [make_rollout(0, None, "failed", tries=3)])
    assert environment_metrics([failed]) == {"environment/failed": 1.0, "environment/retries": 0.0}


def test_rollouts_of_one_turn_have_none() -> None:
    single_turn = replace(make_rollout(1, 1.0, "done"), episode=None)
    assert environment_metrics([RolloutGroup(Task("t", [], "", None), [single_turn])]) == {}
