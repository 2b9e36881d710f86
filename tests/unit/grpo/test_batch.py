"""Every prompt ends in exactly one state, and the sampled tokens are the trained ones."""

from dataclasses import replace

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
LOSS = GrpoLossSection("grpo", "rollout", None, None, None, None, 1.0, 0.0, "k3", None, 0.0, 0.2, 0.2, None, "token")


def config(skip: bool) -> GrpoSection:
    sampling = DynamicSamplingSection("rewards" if skip else None, 0.0)
    return GrpoSection(1, 4, 4, 1, sampling, OVERLONG, GroupMeanSection("group_mean", False), LOSS)


def group(name: str, values: list[float | None]) -> RolloutGroup:
    task = Task(name, [7, 8], "?", "!")
    rollouts = []
    for i, value in enumerate(values):
        answer = Completion(np.full(3, i, np.int32), np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")
        request = turn(0, i, task.tokens)
        whole = Rollout.from_turn(request, answer)
        identity = replace(whole.id, task=name)
        rollouts.append(replace(whole, id=identity, score=Score(value, {}, None, False)))
    return RolloutGroup(task, rollouts)


values = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=5)


@given(st.lists(values, min_size=1, max_size=8), st.booleans(), st.integers(1, 4))
def test_each_prompt_ends_once_and_shares_are_whole_groups(rows: list, skip: bool, count: int) -> None:
    groups = [group(f"p{i}", row) for i, row in enumerate(rows)]
    batch = make_batch(groups, config(skip), ADVANTAGE)
    ended = [*batch.outcomes.trained, *(p for ids in batch.outcomes.filtered.values() for p in ids)]
    ended += [p for ids in batch.outcomes.dropped.values() for p in ids]
    assert sorted(ended) == sorted(g.task.id for g in groups)
    trained = [g for g in groups if g.task.id in batch.outcomes.trained]
    assert len(batch.sequences) == sum(score.value is not None for g in trained for score in g.scores)
    shares = batch.shares(count)
    assert sum(map(len, shares)) == len(batch.sequences)
    sizes = [len({batch.owners[i] for i in rows}) for rows in _rows(batch, shares)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def _rows(batch: TrainingBatch, shares: list) -> list[list[int]]:
    order = {id(sequence): index for index, sequence in enumerate(batch.sequences)}
    return [[order[id(sequence)] for sequence in share] for share in shares]


def test_rollouts_without_a_score_and_uniform_groups_say_why_they_are_missing() -> None:
    groups = [group("a", [1.0, None, 0.0]), group("b", [None, None]), group("c", [1.0, 1.0])]
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
    batch = make_batch([group("c", [1.0, 1.0])], config(skip=False), ADVANTAGE)
    assert batch.outcomes.trained == ["c"] and not batch.outcomes.filtered
    assert [sequence.columns["advantage"].tolist() for sequence in batch.sequences] == [[0.0] * 5] * 2


def test_failed_rollouts_do_not_hide_that_the_others_are_equal() -> None:
    assert make_batch([group("d", [1.0, None, 1.0])], config(skip=True), ADVANTAGE).outcomes.filtered == {
        "all rewards equal": ["d"]
    }


def test_groups_are_told_apart_by_draw_though_their_prompts_are_equal() -> None:
    batch = make_batch([group("e0-r1", [1.0, 0.0]), group("e1-r1", [1.0, 1.0, 0.0, 0.0])], config(skip=True), ADVANTAGE)
    assert batch.owners.tolist() == [0, 0, 1, 1, 1, 1]
    assert [one.columns["advantage"][-1] for one in batch.sequences] == pytest.approx([0.5, -0.5, 0.5, 0.5, -0.5, -0.5])


def test_shares_keep_groups_whole_and_in_drawing_order() -> None:
    groups = [group(f"p{i}", [1.0, 0.0]) for i in range(5)]
    batch = make_batch(groups, config(skip=True), ADVANTAGE)
    shares = [sorted({int(batch.owners[row]) for row in rows}) for rows in _rows(batch, batch.shares(2))]
    assert shares == [[0, 1, 2], [3, 4]]
    assert len(batch.shares(9)) == 5


def test_nothing_to_train_on_makes_no_update() -> None:
    batch = make_batch([group("b", [None])], config(skip=True), ADVANTAGE)
    assert (batch.sequences, batch.shares(2)) == ([], [])


def test_a_further_field_goes_to_its_own_sequence() -> None:
    batch = make_batch([group("a", [1.0, 0.0])], config(skip=True), ADVANTAGE)
    columns = [np.full(5, row, np.float32) for row in range(2)]
    more = with_column(batch.sequences, "proximal_log_prob", columns)
    assert [one.columns["proximal_log_prob"].tolist() for one in more] == [[0.0] * 5, [1.0] * 5]
    assert [one.columns["advantage"].tolist() for one in more] == [
        one.columns["advantage"].tolist() for one in batch.sequences
    ]
    assert "proximal_log_prob" not in batch.sequences[0].columns


def test_parts_joined_are_the_batch_of_all_groups() -> None:
    groups = [group("a", [1.0, 0.0]), group("b", [None]), group("c", [1.0, 1.0]), group("d", [0.0, None, 1.0])]
    whole = make_batch(groups, config(skip=True), ADVANTAGE)
    parts = [groups[:2], groups[2:3], groups[3:]]
    joined = TrainingBatch.join(
        [make_batch(part, config(skip=True), ADVANTAGE) for part in parts], [len(part) for part in parts]
    )
    assert joined.owners.tolist() == whole.owners.tolist() == [0, 0, 3, 3]
    assert joined.outcomes == whole.outcomes
    for one, other in zip(joined.sequences, whole.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.columns["advantage"], other.columns["advantage"])


def spoiled(whole: RolloutGroup, places: dict[int, tuple[int, float]]) -> RolloutGroup:
    """The group with a log-prob of some rollouts, rollout -> (token, value), replaced."""
    rollouts = list(whole.rollouts)
    for place, (token, value) in places.items():
        log_probs = rollouts[place].log_probs.copy()
        log_probs[np.flatnonzero(rollouts[place].sampled)[token]] = value
        rollouts[place] = replace(rollouts[place], rows=[replace(rollouts[place].rows[0], log_probs=log_probs)])
    return RolloutGroup(whole.task, rollouts)


def test_a_rollout_whose_log_prob_is_not_finite_is_named_left_out_and_in_no_baseline() -> None:
    groups = [
        spoiled(group("a", [1.0, 0.0, 1.0]), {0: (2, np.nan)}),
        spoiled(group("b", [1.0]), {0: (0, -np.inf)}),
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
    batch = make_batch([group("a", [1.0, 0.0]), group("b", [1.0]), group("c", [0.0])], config(skip=False), ADVANTAGE)
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    # Where the prompt stands nothing is read.
    columns[0][0] = np.nan
    columns[1][4], columns[2][2] = np.inf, np.nan
    after = add_column(batch, name, columns, config(skip=False), ADVANTAGE)
    assert list(map(str, after.left_out)) == [
        f"prompt a, rollout 1, token 2: {name} is inf",
        f"prompt b, rollout 0, token 0: {name} is nan",
    ]
    assert (after.places, after.owners.tolist()) == ([("a", 0), ("c", 0)], [0, 2])
    assert after.outcomes.trained == ["a", "c"]
    assert after.outcomes.dropped == {NOT_FINITE: ["b"]}
    assert [sequence.columns[name] is columns[row] for sequence, row in zip(after.sequences, (0, 3))] == [True, True]
    # The rest of its group is compared with nothing.
    assert after.sequences[0].columns["advantage"][-1] == 0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", roles_by_column(COLUMNS))
def test_whoever_finds_a_log_prob_that_is_not_finite_the_others_advantages_are_the_same(name: str, skip: bool) -> None:
    groups = [group("a", [1.0, 0.0, 0.5, 1.0]), group("b", [1.0, 0.0, 1.0]), group("c", [0.0, 2.0])]
    places = {0: {0: (1, np.nan)}, 1: {1: (0, np.inf)}}
    expected = make_batch([spoiled(each, places.get(i, {})) for i, each in enumerate(groups)], config(skip), ADVANTAGE)
    batch = make_batch(groups, config(skip), ADVANTAGE)
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    columns[0][3], columns[5][2] = np.nan, np.inf
    after = add_column(batch, name, columns, config(skip), ADVANTAGE)
    assert (after.places, after.outcomes) == (expected.places, expected.outcomes)
    assert after.owners.tolist() == expected.owners.tolist()
    assert after.scored.reward.tolist() == expected.scored.reward.tolist()
    assert [(each.prompt_id, each.rollout, each.token) for each in after.left_out] == [
        (each.prompt_id, each.rollout, each.token) for each in expected.left_out
    ]
    for one, other in zip(after.sequences, expected.sequences, strict=True):
        assert one.columns["advantage"].dtype == np.float32
        assert one.columns["advantage"].tolist() == other.columns["advantage"].tolist()
    # The batch that it was made of is as before.
    assert batch.outcomes == make_batch(groups, config(skip), ADVANTAGE).outcomes


def test_parts_of_a_step_keep_their_places_and_who_was_left_out() -> None:
    parts = [[spoiled(group("a", [1.0, 0.0]), {1: (0, np.nan)})], [group("b", [1.0, 0.0]), group("c", [1.0])]]
    joined = TrainingBatch.join([make_batch(part, config(skip=False), ADVANTAGE) for part in parts], [1, 2])
    assert joined.places == [("a", 0), ("b", 0), ("b", 1), ("c", 0)]
    assert joined.owners.tolist() == [0, 1, 1, 2]
    assert [each.rollout for each in joined.left_out] == [1]


def test_an_advantage_of_the_whole_step_is_computed_again_of_what_a_pass_left_in() -> None:
    advantage = BatchNormalized("group_mean")
    groups = [group("a", [1.0, 0.0, 0.5]), group("b", [1.0, 0.0]), group("c", [1.0, 1.0])]
    batch = make_batch(groups, config(skip=True), advantage)
    assert sum(float(one.columns["advantage"].sum()) for one in batch.sequences) == pytest.approx(0, abs=1e-5)
    columns = [np.full(5, -0.5, np.float32) for _ in batch.sequences]
    columns[0][3] = np.nan
    after = add_column(batch, "proximal_log_prob", columns, config(skip=True), advantage)
    expected = make_batch([spoiled(groups[0], {0: (1, np.nan)}), *groups[1:]], config(skip=True), advantage)
    for one, other in zip(after.sequences, expected.sequences, strict=True):
        assert one.columns["advantage"].tolist() == other.columns["advantage"].tolist()
    # The other group's changed too: its mean and deviation are the step's.
    assert after.sequences[2].columns["advantage"][-1] != batch.sequences[3].columns["advantage"][-1]


def test_advantages_of_a_scores_rewards_have_their_weights() -> None:
    one = group("a", [1.0, 0.0])
    scores = [Score(1.5 - i, {"exact": 1.0 - i, "form": 0.5}, None, True, {"exact": 1.0}) for i in range(2)]
    one = RolloutGroup(one.task, [replace(each, score=score) for each, score in zip(one.rollouts, scores)])
    scored = make_batch([one], config(skip=False), ADVANTAGE).scored
    assert {name: part.tolist() for name, part in scored.parts.items()} == {"exact": [1.0, 0.0], "form": [0.5, 0.5]}
    assert scored.weights == {"exact": 1.0, "form": 1.0} and scored.num_sampled.tolist() == [3, 3]


def rewritten(name: str, value: float) -> RolloutGroup:
    """A group of two rollouts, of which the first has two rows."""
    one = group(name, [value, 0.0])
    first = one.rollouts[0]
    row = first.rows[0]
    longer = replace(row, tokens=np.append(row.tokens, 5).astype(np.int32), sampled=np.append(row.sampled, True))
    longer = replace(longer, **{column: np.append(getattr(row, column), -1) for column in ("log_probs", "versions")})
    return replace(one, rollouts=[replace(first, rows=[row, longer]), one.rollouts[1]])


def test_rows_of_a_rollout_share_its_advantage_and_its_number_and_count_once_in_the_baseline() -> None:
    batch = make_batch([rewritten("p0", 1.0)], config(skip=False), ADVANTAGE)
    assert batch.scored.reward.tolist() == [1.0, 0.0] and batch.rows.tolist() == [0, 0, 1]
    assert [each.rollout for each in batch.sequences] == [0, 0, None]
    assert [len(each) for each in batch.sequences] == [5, 6, 5]
    worth = [set(each.columns["advantage"][each.mask].tolist()) for each in batch.sequences]
    assert worth == [{0.5}, {0.5}, {-0.5}] and not batch.cut.any()


def test_a_row_that_is_not_finite_leaves_its_whole_rollout_out() -> None:
    batch = make_batch([rewritten("p0", 1.0), rewritten("p1", 1.0)], config(skip=False), ADVANTAGE)
    columns = [np.zeros(len(each), np.float32) for each in batch.sequences]
    columns[1][4] = np.nan
    after = add_column(batch, "proximal_log_prob", columns, config(skip=False), ADVANTAGE)
    assert [str(each) for each in after.left_out] == ["prompt p0, rollout 0, token 2: proximal_log_prob is nan"]
    assert after.rows.tolist() == [0, 1, 1, 2] and after.scored.reward.tolist() == [0.0, 1.0, 0.0]
    worth = [set(each.columns["advantage"][each.mask].tolist()) for each in after.sequences]
    assert worth == [{0.0}, {0.5}, {0.5}, {-0.5}]


def computed_for(batch: TrainingBatch) -> list[np.ndarray]:
    """A column that has the number of the sequence and of its token in every value."""
    return [row + np.arange(len(each), dtype=np.float32) / 10 for row, each in enumerate(batch.sequences)]


@pytest.mark.parametrize("mask", [False, True])
def test_an_advantage_gets_the_columns_that_it_names_of_each_rollout_of_the_baseline(mask: bool) -> None:
    """Also of a rollout of two rows, and of a cut rollout without an update."""
    section, pull = config(skip=False), ReferencePull(coef=1.0)
    section = replace(section, overlong=replace(OVERLONG, mask=mask))
    one = rewritten("p0", 1.0)
    cut = replace(one.rollouts[1], finish="length", id=replace(one.rollouts[1].id, index=2))
    one = replace(one, rollouts=[*one.rollouts, cut])
    batch = make_batch([one], section, pull)
    assert all("advantage" not in each.columns for each in batch.sequences)
    assert [len(each) for each in batch.sequences] == [5, 6, 5, 5]
    values = computed_for(batch)
    after = add_column(batch, "reference_log_prob", values, section, pull)
    assert after.rows.tolist() == ([0, 0, 1] if mask else [0, 0, 1, 2]) and after.cut.tolist() == [False, False, mask]
    for each, reference in zip(after.sequences, values):
        own = reference[each.mask] - each.columns["rollout_log_prob"][each.mask]
        centred = (1.0 if each.rollout == 0 else 0.0) - 1 / 3
        assert each.columns["advantage"][each.mask] == pytest.approx(own + centred)
    assert [len(column) for column in after.scored.columns["reference_log_prob"]] == [7, 3, 3]


def test_a_later_column_that_is_not_finite_leaves_a_rollout_out_of_such_advantages() -> None:
    section, pull = replace(config(skip=False), overlong=replace(OVERLONG, mask=True)), ReferencePull(coef=0.0)
    one = group("a", [1.0, 0.0, 0.0])
    one = replace(one, rollouts=[replace(one.rollouts[0], finish="length"), *one.rollouts[1:]])
    batch = make_batch([one], section, pull)
    batch = add_column(batch, "reference_log_prob", computed_for(batch), section, pull)
    assert [each.columns["advantage"][-1] for each in batch.sequences] == pytest.approx([-1 / 3, -1 / 3])
    spoilt = [np.full(5, np.nan, np.float32), np.zeros(5, np.float32)]
    after = add_column(batch, "proximal_log_prob", spoilt, section, pull)
    assert after.places == [("a", 2)] and after.cut.tolist() == [True, False]
    assert after.sequences[0].columns["advantage"][-1] == pytest.approx(-0.5)
