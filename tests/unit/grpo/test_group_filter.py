"""Filtering of groups that teach nothing, and masking of answers cut at the length limit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.grpo_schema import DynamicSamplingSection, GrpoSection, OverlongSection
from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.sections import GroupMeanSection
from rlctl.grpo.batch import add_column, make_batch, why_it_teaches_nothing
from rlctl.grpo.group_filter import RIGHT, TRUNCATED, UNIFORM, WRONG, Filter, why_nothing
from rlctl.grpo.losses.sections import GrpoLossSection
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup
from tests.turns import turn

ADVANTAGE = GroupMean(normalize_std=False)
LOSS = GrpoLossSection(
    "grpo", "rollout", None, None, None, None, 1.0, 0.0, "k3", None, 0.0, None, 0.2, 0.2, None, "token"
)


def config(by: Filter = None, mask: bool = False) -> GrpoSection:
    sampling = DynamicSamplingSection(by, 3.0)
    overlong = OverlongSection(None, 1.0, mask)
    return GrpoSection(1, 4, 4, 1, sampling, overlong, GroupMeanSection("group_mean", False), LOSS)


def make_group(name: str, *rollouts: tuple[float | None, bool, bool]) -> RolloutGroup:
    """Return a group. rollouts: (reward, True if right, True if cut at the limit) of each rollout."""
    task = Task(name, [7, 8], "?", "!")
    scored = []
    for index, (reward, is_right, is_cut) in enumerate(rollouts):
        answer = Completion(np.full(3, index, np.int32), np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")
        answer = replace(answer, finish="length" if is_cut else "stop")
        rollout = Rollout.from_turn(turn(0, index, task.tokens), answer)
        score = Score(reward, {}, None, is_right)
        scored.append(replace(rollout, id=replace(rollout.id, task=name), score=score))
    return RolloutGroup(task, scored)


rewards_of_groups = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6)


@given(rewards_of_groups)
def test_a_group_of_equal_rewards_has_no_gradient_and_any_other_has(rewards: list[float]) -> None:
    drawn_group = make_group("a", *((reward, False, False) for reward in rewards))
    batch = make_batch([drawn_group], config(), ADVANTAGE)
    has_no_gradient = all(not sequence.columns["advantage"].any() for sequence in batch.sequences)
    assert (why_nothing(rewards, [False] * len(rewards), "rewards") == UNIFORM) == has_no_gradient


def test_accuracy_is_not_blurred_by_rewards_for_other_things() -> None:
    assert why_nothing([0.9, 0.7], [True, True], "accuracy") == RIGHT
    assert why_nothing([0.1, 0.0], [False, False], "accuracy") == WRONG
    assert why_nothing([0.5, 0.5], [True, False], "accuracy") is None
    assert why_nothing([0.9, 0.7], [True, True], "rewards") is None
    assert why_nothing([1.0, 1.0], [True, True], None) is None


def test_rollouts_without_a_score_do_not_count_and_a_group_of_none_else_is_kept() -> None:
    failed = (None, False, False)
    assert why_it_teaches_nothing(config("rewards"), make_group("a", (1.0, True, False), failed)) == UNIFORM
    assert why_it_teaches_nothing(config("rewards"), make_group("a", failed, failed)) is None
    assert why_it_teaches_nothing(config(None, mask=True), make_group("a", (1.0, True, True))) is None
    spoiled = make_group("a", (1.0, True, False), (0.0, False, False))
    spoiled.rollouts[1].log_probs[-1] = np.nan
    assert why_it_teaches_nothing(config("rewards"), spoiled) == UNIFORM


def test_a_masked_rollout_is_not_trained_and_counts_in_the_baseline() -> None:
    groups = [
        make_group("a", (1.0, True, False), (0.0, False, True), (0.5, False, False)),
        make_group("b", (1.0, True, True), (0.0, False, True)),
    ]
    batch = make_batch(groups, config(mask=True), ADVANTAGE)
    assert batch.places == [("a", 0), ("a", 2)]
    assert [sequence.columns["advantage"][-1] for sequence in batch.sequences] == [0.5, 0.0]
    assert np.flatnonzero(batch.cut).tolist() == [1] and batch.scored.reward.tolist() == [1.0, 0.0, 0.5]
    assert batch.outcomes.trained == ["a"] and batch.outcomes.filtered == {TRUNCATED: ["b"]}
    assert len(make_batch(groups, config(mask=False), ADVANTAGE).sequences) == 5


@pytest.mark.parametrize("by", ["rewards", "accuracy"])
def test_a_group_that_teaches_nothing_once_a_pass_left_a_rollout_out_is_filtered(by: Filter) -> None:
    groups = [
        make_group("a", (1.0, True, False), (0.0, False, False), (1.0, True, False)),
        make_group("b", (1.0, True, False), (0.0, False, True), (1.0, True, False)),
        make_group("c", (0.0, False, False), (1.0, True, False)),
    ]
    batch = make_batch(groups, config(by, mask=True), ADVANTAGE)
    assert batch.places == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 2), ("c", 0), ("c", 1)]
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    columns[1][4] = columns[3][4] = np.nan
    after = add_column(batch, "proximal_log_prob", columns, config(by, mask=True), ADVANTAGE)
    # Rollout 1 of b is masked, but its reward still counts in the baseline, so b is not filtered.
    assert after.places == [("b", 2), ("c", 0), ("c", 1)]
    assert after.outcomes.filtered == {UNIFORM if by == "rewards" else RIGHT: ["a"]}
    assert [sequence.columns["advantage"][-1] for sequence in after.sequences] == [0.5, -0.5, 0.5]
