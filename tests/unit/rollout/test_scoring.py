"""Scores of episodes: the config's rewards get the whole conversation, and the environment gives a value."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.data.tasks import Task
from rlctl.environments.contract import Reward
from rlctl.generation.requests import Completion
from rlctl.rewards.base import RewardInput, attempt
from rlctl.rewards.load_rewards import load_reward
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.scoring import GroupScorer, reward_input
from rlctl.rollout.types import PlayedEpisode, Rollout, RolloutGroup
from tests.turns import turn

EXACT = RewardSection("exact", 2.0, None, None, 5.0, 64)
TASK = Task("t", [], "", "8", {"low": 1})
MESSAGES = [
    {"role": "user", "content": "1-9="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "+"},
    {"role": "assistant", "content": "8"},
]


def make_episode(reward: Reward | None, failure: str | None = None) -> PlayedEpisode:
    return PlayedEpisode(MESSAGES, 1, "failed" if failure else "done", 2, reward, failure, 0, 0.0, 0, 0)


def make_rollout(episode: PlayedEpisode | None) -> Rollout:
    answer = Completion(np.array([8], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    return replace(Rollout.from_turn(turn(0), answer), episode=episode)


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(map(str, row)) for row in rows]


@pytest.fixture
def score() -> Iterator[Any]:
    """Return a function that scores rollouts by rewards."""
    scorers = list[Scorer]()

    def score_rollouts(sections: list[RewardSection], *rollouts: Rollout) -> list[Score | None]:
        scorer = Scorer(sections)
        scorers.append(scorer)
        (group,) = GroupScorer(scorer, decode)([RolloutGroup(TASK, list(rollouts))])
        return [rollout.score for rollout in group.rollouts]

    yield score_rollouts
    for scorer in scorers:
        scorer.close()


def test_a_reward_judges_the_whole_conversation() -> None:
    row = {"low": 1, "messages": MESSAGES}
    expected = RewardInput("1-9=", "7\n+\n8", "8", row, MESSAGES[:1], MESSAGES[1:], "= ", "8")
    assert reward_input(TASK, make_episode(None), "= ") == expected


@pytest.mark.parametrize(
    ("last_prompt", "answer", "expected_reward"),
    [
        ("", "I do not know.", 0.0),
        ("", "The answer is 8.", 1.0),
        ("<think>\n", "It is 8.", 0.0),
        ("<think>\n", "It is 7.</think>It is 8.", 1.0),
    ],
)
def test_the_final_answer_of_an_episode_is_in_the_policys_last_message(
    last_prompt: str, answer: str, expected_reward: float
) -> None:
    messages = [*MESSAGES[:3], {"role": "assistant", "content": answer}]
    if expected_reward == 0.0:
        messages.append({"role": "tool", "content": "The answer is 8."})
    played = replace(make_episode(None), messages=messages)
    reward = load_reward(replace(EXACT, name="math_verify"))
    assert attempt(reward, reward_input(TASK, played, last_prompt)) == expected_reward


def test_the_end_of_the_prompt_of_an_episodes_last_turn_is_decoded() -> None:
    decoded = list[list[int]]()

    def note_rows(rows: list[list[int]]) -> list[str]:
        decoded.extend(rows)
        return [""] * len(rows)

    with Scorer([EXACT]) as scorer:
        GroupScorer(scorer, note_rows)([RolloutGroup(TASK, [make_rollout(make_episode(None))])])
    assert decoded == [turn(0).prompt_tokens]


def test_an_environments_value_is_a_reward_of_weight_1_beside_the_others(score: Any) -> None:
    (number, parts) = score(
        [EXACT], make_rollout(make_episode(1.0)), make_rollout(make_episode({"won": 0.5, "exact": 0.25}))
    )
    assert number == Score(1.0, {"exact": 0.0, "environment": 1.0}, None, True, {"exact": 2.0})
    assert parts == Score(0.75, {"exact": 0.0, "won": 0.5, "environment.exact": 0.25}, None, False, {"exact": 2.0})


def test_without_rewards_the_environment_alone_decides(score: Any) -> None:
    won, lost = score([], make_rollout(make_episode(1.0)), make_rollout(make_episode(0.5)))
    assert (won.value, won.right, lost.value, lost.right) == (1.0, True, 0.5, False)


def test_a_reward_that_says_when_it_is_right_decides_before_the_environment(score: Any) -> None:
    (judged,) = score([replace(EXACT, correct_at=1.0)], make_rollout(make_episode(1.0)))
    assert judged.right is False


def test_an_episode_that_failed_has_no_value_and_no_reward_is_asked(score: Any) -> None:
    failed, fine = score(
        [EXACT], make_rollout(make_episode(None, "died: its process ended")), make_rollout(make_episode(1.0))
    )
    assert failed == Score(None, {"exact": None}, "environment: died: its process ended", False)
    assert fine.value == 1.0


def test_a_rollout_of_one_turn_is_judged_by_its_answer(score: Any) -> None:
    (judged,) = score([EXACT], make_rollout(None))
    assert (judged.value, judged.right) == (2.0, True)


def test_an_episode_that_nothing_values_has_no_value_and_did_not_fail(score: Any) -> None:
    assert score([], make_rollout(make_episode(None))) == [Score(None, {}, None, right=False)]
