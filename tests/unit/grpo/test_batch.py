"""Training batches: every prompt ends in exactly one state, and exactly the sampled tokens are trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.grpo_schema import DynamicSamplingSection, GrpoSection, OverlongSection
from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion
from rlctl.grpo.advantages.batch_normalized import BatchNormalized
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.sections import GroupMeanSection
from rlctl.grpo.batch import NOT_FINITE, TrainingBatch, add_column, make_batch, with_column
from rlctl.grpo.losses.sections import GrpoLossSection
from rlctl.preflight.declared_columns import COLUMNS, roles_by_column
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup
from tests.plugins.reference_pull import ReferencePull
from tests.turns import turn

OVERLONG = OverlongSection(None, 1.0, False)
ADVANTAGE = GroupMean(normalize_std=False)
LOSS = GrpoLossSection(
    "grpo", "rollout", None, None, None, None, 1.0, 0.0, "k3", None, 0.0, None, 0.2, 0.2, None, "token"
)


def config(skip: bool) -> GrpoSection:
    sampling = DynamicSamplingSection("rewards" if skip else None, 0.0)
    return GrpoSection(1, 4, 4, 1, sampling, OVERLONG, GroupMeanSection("group_mean", False), LOSS)


def make_group(name: str, rewards: list[float | None]) -> RolloutGroup:
    task = Task(name, [7, 8], "?", "!")
    rollouts = []
    for index, reward in enumerate(rewards):
        answer = Completion(np.full(3, index, np.int32), np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")
        rollout = Rollout.from_turn(turn(0, index, task.tokens), answer)
        rollout_id = replace(rollout.id, task=name)
        rollouts.append(replace(rollout, id=rollout_id, score=Score(reward, {}, None, False)))
    return RolloutGroup(task, rollouts)


rewards_of_groups = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=5)


@given(st.lists(rewards_of_groups, min_size=1, max_size=8), st.booleans(), st.integers(1, 4))
def test_each_prompt_ends_once_and_shares_are_whole_groups(rewards: list, skip: bool, count: int) -> None:
    groups = [make_group(f"p{number}", rewards_of_group) for number, rewards_of_group in enumerate(rewards)]
    batch = make_batch(groups, config(skip), ADVANTAGE)
    ended = list(batch.outcomes.trained)
    for prompt_ids in [*batch.outcomes.filtered.values(), *batch.outcomes.dropped.values()]:
        ended += prompt_ids
    assert sorted(ended) == sorted(group.task.id for group in groups)
    num_scored = 0
    for group in groups:
        if group.task.id in batch.outcomes.trained:
            num_scored += sum(score.value is not None for score in group.scores)
    assert len(batch.sequences) == num_scored
    shares = batch.shares(count)
    assert sum(map(len, shares)) == len(batch.sequences)
    sizes = [len({batch.owners[place] for place in places}) for places in find_places(batch, shares)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def find_places(batch: TrainingBatch, shares: list) -> list[list[int]]:
    """Return for each share the indices of its sequences in the batch."""
    order = {id(sequence): index for index, sequence in enumerate(batch.sequences)}
    return [[order[id(sequence)] for sequence in share] for share in shares]


def test_rollouts_without_a_score_and_uniform_groups_say_why_they_are_missing() -> None:
    groups = [make_group("a", [1.0, None, 0.0]), make_group("b", [None, None]), make_group("c", [1.0, 1.0])]
    batch = make_batch(groups, config(skip=True), ADVANTAGE)
    assert batch.outcomes.trained == ["a"]
    assert batch.outcomes.dropped == {"no rollout could be scored": ["b"]}
    assert batch.outcomes.filtered == {"all rewards equal": ["c"]}
    first, second = batch.sequences
    assert first.tokens.tolist() == [7, 8, 0, 0, 0]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert first.columns["advantage"].tolist() == pytest.approx([0, 0, 0.5, 0.5, 0.5])
    assert first.columns["rollout_log_prob"].tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert second.tokens[-1] == 2


def test_a_uniform_group_is_trained_unless_it_is_to_be_skipped_and_pulls_nowhere() -> None:
    batch = make_batch([make_group("c", [1.0, 1.0])], config(skip=False), ADVANTAGE)
    assert batch.outcomes.trained == ["c"] and not batch.outcomes.filtered
    assert [sequence.columns["advantage"].tolist() for sequence in batch.sequences] == [[0.0] * 5] * 2


def test_failed_rollouts_do_not_hide_that_the_others_are_equal() -> None:
    assert make_batch([make_group("d", [1.0, None, 1.0])], config(skip=True), ADVANTAGE).outcomes.filtered == {
        "all rewards equal": ["d"]
    }


def test_groups_are_told_apart_by_draw_though_their_prompts_are_equal() -> None:
    groups = [make_group("e0-r1", [1.0, 0.0]), make_group("e1-r1", [1.0, 1.0, 0.0, 0.0])]
    batch = make_batch(groups, config(skip=True), ADVANTAGE)
    assert batch.owners.tolist() == [0, 0, 1, 1, 1, 1]
    advantages = [sequence.columns["advantage"][-1] for sequence in batch.sequences]
    assert advantages == pytest.approx([0.5, -0.5, 0.5, 0.5, -0.5, -0.5])


def test_shares_keep_groups_whole_and_in_drawing_order() -> None:
    groups = [make_group(f"p{number}", [1.0, 0.0]) for number in range(5)]
    batch = make_batch(groups, config(skip=True), ADVANTAGE)
    places_of_shares = find_places(batch, batch.shares(2))
    shares = [sorted({int(batch.owners[place]) for place in places}) for places in places_of_shares]
    assert shares == [[0, 1, 2], [3, 4]]
    assert len(batch.shares(9)) == 5


def test_nothing_to_train_on_makes_no_update() -> None:
    batch = make_batch([make_group("b", [None])], config(skip=True), ADVANTAGE)
    assert (batch.sequences, batch.shares(2)) == ([], [])


def list_column(sequences: Sequence[Any], name: str) -> list[list[float]]:
    """Return the values of a column, for each sequence."""
    return [sequence.columns[name].tolist() for sequence in sequences]


def test_a_further_field_goes_to_its_own_sequence() -> None:
    batch = make_batch([make_group("a", [1.0, 0.0])], config(skip=True), ADVANTAGE)
    columns = [np.full(5, row, np.float32) for row in range(2)]
    extended = with_column(batch.sequences, "proximal_log_prob", columns)
    assert list_column(extended, "proximal_log_prob") == [[0.0] * 5, [1.0] * 5]
    assert list_column(extended, "advantage") == list_column(batch.sequences, "advantage")
    assert "proximal_log_prob" not in batch.sequences[0].columns


def test_parts_joined_are_the_batch_of_all_groups() -> None:
    groups = [
        make_group("a", [1.0, 0.0]),
        make_group("b", [None]),
        make_group("c", [1.0, 1.0]),
        make_group("d", [0.0, None, 1.0]),
    ]
    expected = make_batch(groups, config(skip=True), ADVANTAGE)
    parts = [groups[:2], groups[2:3], groups[3:]]
    batches = [make_batch(part, config(skip=True), ADVANTAGE) for part in parts]
    joined = TrainingBatch.join(batches, [len(part) for part in parts])
    assert joined.owners.tolist() == expected.owners.tolist() == [0, 0, 3, 3]
    assert joined.outcomes == expected.outcomes
    for sequence, expected_sequence in zip(joined.sequences, expected.sequences, strict=True):
        assert np.array_equal(sequence.tokens, expected_sequence.tokens)
        assert np.array_equal(sequence.columns["advantage"], expected_sequence.columns["advantage"])


def spoil_log_probs(group: RolloutGroup, places: dict[int, tuple[int, float]]) -> RolloutGroup:
    """Return the group with one log-prob replaced in some rollouts. places: rollout -> (sampled token, new value)."""
    rollouts = list(group.rollouts)
    for place, (token, value) in places.items():
        log_probs = rollouts[place].log_probs.copy()
        log_probs[np.flatnonzero(rollouts[place].sampled)[token]] = value
        rollouts[place] = replace(rollouts[place], rows=[replace(rollouts[place].rows[0], log_probs=log_probs)])
    return RolloutGroup(group.task, rollouts)


def test_a_rollout_whose_log_prob_is_not_finite_is_named_left_out_and_in_no_baseline() -> None:
    groups = [
        spoil_log_probs(make_group("a", [1.0, 0.0, 1.0]), {0: (2, np.nan)}),
        spoil_log_probs(make_group("b", [1.0]), {0: (0, -np.inf)}),
    ]
    batch = make_batch(groups, config(skip=False), ADVANTAGE)
    assert list(map(str, batch.left_out)) == [
        "prompt a, rollout 0, token 2: rollout_log_prob is nan",
        "prompt b, rollout 0, token 0: rollout_log_prob is -inf",
    ]
    assert batch.places == [("a", 1), ("a", 2)]
    assert [sequence.columns["advantage"][-1] for sequence in batch.sequences] == [-0.5, 0.5]
    assert batch.outcomes.trained == ["a"]
    assert batch.outcomes.dropped == {NOT_FINITE: ["b"]}
    assert all(np.isfinite(sequence.columns["rollout_log_prob"]).all() for sequence in batch.sequences)


@pytest.mark.parametrize("name", roles_by_column(COLUMNS))
def test_a_pass_whose_log_prob_is_not_finite_leaves_the_rollout_out(name: str) -> None:
    batch = make_batch(
        [make_group("a", [1.0, 0.0]), make_group("b", [1.0]), make_group("c", [0.0])], config(skip=False), ADVANTAGE
    )
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    # A NaN at a prompt token has no effect.
    columns[0][0] = np.nan
    columns[1][4] = np.inf
    columns[2][2] = np.nan
    after = add_column(batch, name, columns, config(skip=False), ADVANTAGE)
    assert list(map(str, after.left_out)) == [
        f"prompt a, rollout 1, token 2: {name} is inf",
        f"prompt b, rollout 0, token 0: {name} is nan",
    ]
    assert (after.places, after.owners.tolist()) == ([("a", 0), ("c", 0)], [0, 2])
    assert after.outcomes.trained == ["a", "c"]
    assert after.outcomes.dropped == {NOT_FINITE: ["b"]}
    first, last = after.sequences
    assert first.columns[name] is columns[0] and last.columns[name] is columns[3]
    # The other rollout of the group has no rollout left to compare with, so its advantage is 0.
    assert after.sequences[0].columns["advantage"][-1] == 0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", roles_by_column(COLUMNS))
def test_whoever_finds_a_log_prob_that_is_not_finite_the_others_advantages_are_the_same(name: str, skip: bool) -> None:
    groups = [make_group("a", [1.0, 0.0, 0.5, 1.0]), make_group("b", [1.0, 0.0, 1.0]), make_group("c", [0.0, 2.0])]
    places = {0: {0: (1, np.nan)}, 1: {1: (0, np.inf)}}
    spoiled = [spoil_log_probs(group, places.get(number, {})) for number, group in enumerate(groups)]
    expected = make_batch(spoiled, config(skip), ADVANTAGE)
    batch = make_batch(groups, config(skip), ADVANTAGE)
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    columns[0][3] = np.nan
    columns[5][2] = np.inf
    after = add_column(batch, name, columns, config(skip), ADVANTAGE)
    assert (after.places, after.outcomes) == (expected.places, expected.outcomes)
    assert after.owners.tolist() == expected.owners.tolist()
    assert after.scored.reward.tolist() == expected.scored.reward.tolist()
    left_out = [(token.prompt_id, token.rollout, token.token) for token in after.left_out]
    assert left_out == [(token.prompt_id, token.rollout, token.token) for token in expected.left_out]
    assert all(sequence.columns["advantage"].dtype == np.float32 for sequence in after.sequences)
    assert list_column(after.sequences, "advantage") == list_column(expected.sequences, "advantage")
    # `add_column` leaves its input batch unchanged.
    assert batch.outcomes == make_batch(groups, config(skip), ADVANTAGE).outcomes


def test_parts_of_a_step_keep_their_places_and_who_was_left_out() -> None:
    spoiled = spoil_log_probs(make_group("a", [1.0, 0.0]), {1: (0, np.nan)})
    parts = [[spoiled], [make_group("b", [1.0, 0.0]), make_group("c", [1.0])]]
    batches = [make_batch(part, config(skip=False), ADVANTAGE) for part in parts]
    joined = TrainingBatch.join(batches, [1, 2])
    assert joined.places == [("a", 0), ("b", 0), ("b", 1), ("c", 0)]
    assert joined.owners.tolist() == [0, 1, 1, 2]
    assert [token.rollout for token in joined.left_out] == [1]


def test_an_advantage_of_the_whole_step_is_computed_again_of_what_a_pass_left_in() -> None:
    advantage = BatchNormalized("group_mean")
    groups = [make_group("a", [1.0, 0.0, 0.5]), make_group("b", [1.0, 0.0]), make_group("c", [1.0, 1.0])]
    batch = make_batch(groups, config(skip=True), advantage)
    total = sum(float(sequence.columns["advantage"].sum()) for sequence in batch.sequences)
    assert total == pytest.approx(0, abs=1e-5)
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    columns[0][3] = np.nan
    after = add_column(batch, "proximal_log_prob", columns, config(skip=True), advantage)
    spoiled = spoil_log_probs(groups[0], {0: (1, np.nan)})
    expected = make_batch([spoiled, *groups[1:]], config(skip=True), advantage)
    assert list_column(after.sequences, "advantage") == list_column(expected.sequences, "advantage")
    # Advantages of another group change too, because mean and deviation are those of the whole step.
    assert after.sequences[2].columns["advantage"][-1] != batch.sequences[3].columns["advantage"][-1]


def test_advantages_of_a_scores_rewards_have_their_weights() -> None:
    unscored = make_group("a", [1.0, 0.0])
    scored_rollouts = []
    for index, rollout in enumerate(unscored.rollouts):
        score = Score(1.5 - index, {"exact": 1.0 - index, "form": 0.5}, None, True, {"exact": 1.0})
        scored_rollouts.append(replace(rollout, score=score))
    batch = make_batch([RolloutGroup(unscored.task, scored_rollouts)], config(skip=False), ADVANTAGE)
    scored = batch.scored
    assert {name: part.tolist() for name, part in scored.parts.items()} == {"exact": [1.0, 0.0], "form": [0.5, 0.5]}
    assert scored.weights == {"exact": 1.0, "form": 1.0} and scored.num_sampled.tolist() == [3, 3]


def make_rewritten_group(name: str, reward: float) -> RolloutGroup:
    """Return a group of two rollouts, of which the first has two rows."""
    plain = make_group(name, [reward, 0.0])
    first = plain.rollouts[0]
    row = first.rows[0]
    longer = replace(row, tokens=np.append(row.tokens, 5).astype(np.int32), sampled=np.append(row.sampled, True))
    longer = replace(longer, **{column: np.append(getattr(row, column), -1) for column in ("log_probs", "versions")})
    return replace(plain, rollouts=[replace(first, rows=[row, longer]), plain.rollouts[1]])


def list_advantages(batch: TrainingBatch) -> list[set[float]]:
    """Return the advantages of the sampled tokens, for each sequence."""
    return [set(sequence.columns["advantage"][sequence.mask].tolist()) for sequence in batch.sequences]


def test_rows_of_a_rollout_share_its_advantage_and_its_number_and_count_once_in_the_baseline() -> None:
    batch = make_batch([make_rewritten_group("p0", 1.0)], config(skip=False), ADVANTAGE)
    assert batch.scored.reward.tolist() == [1.0, 0.0] and batch.rows.tolist() == [0, 0, 1]
    assert [sequence.rollout for sequence in batch.sequences] == [0, 0, None]
    assert [len(sequence) for sequence in batch.sequences] == [5, 6, 5]
    assert list_advantages(batch) == [{0.5}, {0.5}, {-0.5}] and not batch.cut.any()


def test_a_row_that_is_not_finite_leaves_its_whole_rollout_out() -> None:
    batch = make_batch(
        [make_rewritten_group("p0", 1.0), make_rewritten_group("p1", 1.0)], config(skip=False), ADVANTAGE
    )
    columns = [np.zeros(len(sequence), np.float32) for sequence in batch.sequences]
    columns[1][4] = np.nan
    after = add_column(batch, "proximal_log_prob", columns, config(skip=False), ADVANTAGE)
    assert list(map(str, after.left_out)) == ["prompt p0, rollout 0, token 2: proximal_log_prob is nan"]
    assert after.rows.tolist() == [0, 1, 1, 2] and after.scored.reward.tolist() == [0.0, 1.0, 0.0]
    assert list_advantages(after) == [{0.0}, {0.5}, {0.5}, {-0.5}]


def compute_column(batch: TrainingBatch) -> list[np.ndarray]:
    """Return for each sequence an array with the value (index of the sequence) + (index of the token) / 10."""
    return [row + np.arange(len(sequence), dtype=np.float32) / 10 for row, sequence in enumerate(batch.sequences)]


@pytest.mark.parametrize("mask", [False, True])
def test_an_advantage_gets_the_columns_that_it_names_of_each_rollout_of_the_baseline(mask: bool) -> None:
    """The baseline has a rollout of two rows, and a cut rollout that is not trained if the mask is on."""
    pull = ReferencePull(coef=1.0)
    section = replace(config(skip=False), overlong=replace(OVERLONG, mask=mask))
    uncut = make_rewritten_group("p0", 1.0)
    cut_rollout = replace(uncut.rollouts[1], finish="length", id=replace(uncut.rollouts[1].id, index=2))
    batch = make_batch([replace(uncut, rollouts=[*uncut.rollouts, cut_rollout])], section, pull)
    assert all("advantage" not in sequence.columns for sequence in batch.sequences)
    assert [len(sequence) for sequence in batch.sequences] == [5, 6, 5, 5]
    values = compute_column(batch)
    after = add_column(batch, "reference_log_prob", values, section, pull)
    assert after.rows.tolist() == ([0, 0, 1] if mask else [0, 0, 1, 2]) and after.cut.tolist() == [False, False, mask]
    for sequence, reference in zip(after.sequences, values):
        sampled = sequence.mask
        gap = reference[sampled] - sequence.columns["rollout_log_prob"][sampled]
        centred_reward = (1.0 if sequence.rollout == 0 else 0.0) - 1 / 3
        assert sequence.columns["advantage"][sampled] == pytest.approx(gap + centred_reward)
    assert [len(column) for column in after.scored.columns["reference_log_prob"]] == [7, 3, 3]


def test_a_later_column_that_is_not_finite_leaves_a_rollout_out_of_such_advantages() -> None:
    section = replace(config(skip=False), overlong=replace(OVERLONG, mask=True))
    pull = ReferencePull(coef=0.0)
    uncut = make_group("a", [1.0, 0.0, 0.0])
    cut_rollout = replace(uncut.rollouts[0], finish="length")
    batch = make_batch([replace(uncut, rollouts=[cut_rollout, *uncut.rollouts[1:]])], section, pull)
    batch = add_column(batch, "reference_log_prob", compute_column(batch), section, pull)
    advantages = [sequence.columns["advantage"][-1] for sequence in batch.sequences]
    assert advantages == pytest.approx([-1 / 3, -1 / 3])
    spoiled_column = [np.full(5, np.nan, np.float32), np.zeros(5, np.float32)]
    after = add_column(batch, "proximal_log_prob", spoiled_column, section, pull)
    assert after.places == [("a", 2)] and after.cut.tolist() == [True, False]
    assert after.sequences[0].columns["advantage"][-1] == pytest.approx(-0.5)


def test_a_wide_column_that_is_not_finite_leaves_the_rollout_out() -> None:
    batch = make_batch([make_group("a", [1.0, 0.0, 0.5])], config(skip=False), ADVANTAGE)
    columns = [np.zeros((5, 3, 2), np.float32) for _ in batch.sequences]
    columns[1][4, 2, 1] = np.nan
    after = add_column(batch, "teacher_top", columns, config(skip=False), ADVANTAGE)
    assert list(map(str, after.left_out)) == ["prompt a, rollout 1, token 2: teacher_top is nan"]
    assert after.places == [("a", 0), ("a", 2)]
