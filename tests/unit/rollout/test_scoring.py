"""Scores of episodes: the rewards of the config on the whole conversation, and the value that the environment gave."""

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

EXACT = RewardSection("exact", 2.0, None, None, 5.0)
TASK = Task("t", [], "", "8", {"low": 1})
SAID = [
    {"role": "user", "content": "1-9="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "+"},
    {"role": "assistant", "content": "8"},
]


def episode(reward: Reward | None, failure: str | None = None) -> PlayedEpisode:
    return PlayedEpisode(SAID, 1, "failed" if failure else "done", 2, reward, failure, 0, 0.0, 0, 0)


def rollout(played: PlayedEpisode | None) -> Rollout:
    answer = Completion(np.array([8], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    return replace(Rollout.from_turn(turn(0), answer), episode=played)


@pytest.fixture
def scored() -> Iterator[Any]:
    scorers = list[Scorer]()

    def score(sections: list[RewardSection], *rollouts: Rollout) -> list[Score | None]:
        scorers.append(Scorer(sections))
        decode = lambda rows: ["".join(map(str, row)) for row in rows]  # noqa: E731
        (group,) = GroupScorer(scorers[-1], decode)([RolloutGroup(TASK, list(rollouts))])
        return [one.score for one in group.rollouts]

    yield score
    for each in scorers:
        each.close()


def test_a_reward_judges_the_whole_conversation() -> None:
    found = reward_input(TASK, episode(None), "= ")
    assert found == RewardInput("1-9=", "7\n+\n8", "8", {"low": 1, "messages": SAID}, SAID[:1], SAID[1:], "= ", "8")


@pytest.mark.parametrize(
    ("last_prompt", "said", "value"),
    [
        ("", "I do not know.", 0.0),
        ("", "The answer is 8.", 1.0),
        ("<think>\n", "It is 8.", 0.0),
        ("<think>\n", "It is 7.</think>It is 8.", 1.0),
    ],
)
def test_the_final_answer_of_an_episode_is_in_the_policys_last_message(
    last_prompt: str, said: str, value: float
) -> None:
    tool = {"role": "tool", "content": "The answer is 8."}
    messages = [*SAID[:3], {"role": "assistant", "content": said}, *[tool] * (value == 0.0)]
    played = replace(episode(None), messages=messages)
    reward = load_reward(replace(EXACT, name="math_verify"))
    assert attempt(reward, reward_input(TASK, played, last_prompt)) == value


def test_the_end_of_the_prompt_of_an_episodes_last_turn_is_decoded() -> None:
    decoded = list[list[int]]()

    def decode(rows: list[list[int]]) -> list[str]:
        decoded.extend(rows)
        return [""] * len(rows)

    with Scorer([EXACT]) as scorer:
        GroupScorer(scorer, decode)([RolloutGroup(TASK, [rollout(episode(None))])])
    assert decoded == [turn(0).prompt_tokens]


def test_an_environments_value_is_a_reward_of_weight_1_beside_the_others(scored: Any) -> None:
    (number, parts) = scored([EXACT], rollout(episode(1.0)), rollout(episode({"won": 0.5, "exact": 0.25})))
    assert number == Score(1.0, {"exact": 0.0, "environment": 1.0}, None, True, {"exact": 2.0})
    assert parts == Score(0.75, {"exact": 0.0, "won": 0.5, "environment.exact": 0.25}, None, False, {"exact": 2.0})


def test_without_rewards_the_environment_alone_decides(scored: Any) -> None:
    won, lost = scored([], rollout(episode(1.0)), rollout(episode(0.5)))
    assert (won.value, won.right, lost.value, lost.right) == (1.0, True, 0.5, False)


def test_a_reward_that_says_when_it_is_right_decides_before_the_environment(scored: Any) -> None:
    (one,) = scored([replace(EXACT, correct_at=1.0)], rollout(episode(1.0)))
    assert one.right is False


def test_an_episode_that_failed_has_no_value_and_no_reward_is_asked(scored: Any) -> None:
    failed, fine = scored([EXACT], rollout(episode(None, "died: its process ended")), rollout(episode(1.0)))
    assert failed == Score(None, {"exact": None}, "environment: died: its process ended", False)
    assert fine.value == 1.0


def test_a_rollout_of_one_turn_is_judged_by_its_answer(scored: Any) -> None:
    (one,) = scored([EXACT], rollout(None))
    assert (one.value, one.right) == (2.0, True)


def test_an_episode_that_nothing_values_has_no_value_and_did_not_fail(scored: Any) -> None:
    assert scored([], rollout(episode(None))) == [Score(None, {}, None, right=False)]
