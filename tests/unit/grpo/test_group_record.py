"""The record of a group has the sampled text with its turns marked, and the advantage of each rollout."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion
from rlctl.grpo.batch import TrainingBatch, make_batch
from rlctl.grpo.group_record import group_records, step_records
from rlctl.rewards.scorer import Score
from rlctl.rollout.conversation import TrajectoryRow
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.telemetry.exact_tokens import unpack
from tests.turns import turn
from tests.unit.grpo.test_batch import ADVANTAGE, config, make_group


def decode(rows: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_each_rollout_has_the_advantage_that_it_was_trained_with_and_one_without_a_score_has_none() -> None:
    groups = [make_group("a", [0.0, 1.0, None]), make_group("b", [1.0, 1.0])]
    first, second = step_records(groups, make_batch(groups, config(skip=True), ADVANTAGE), decode)
    assert [rollout["advantage"] for rollout in first["rollouts"]] == [-0.5, 0.5, None]
    assert first["outcome"] == "trained" and "advantages" not in first["rollouts"][0]
    assert second["outcome"] == "filtered: all rewards equal"
    assert [rollout["advantage"] for rollout in second["rollouts"]] == [None, None]
    assert first["rollouts"][2]["right"] is None and first["rollouts"][1]["reward"] == 1.0


def test_advantages_that_differ_within_a_rollout_are_told_by_mean_and_range() -> None:
    groups = [make_group("a", [0.0, 1.0])]
    batch = make_batch(groups, config(skip=False), ADVANTAGE)
    sample = batch.sequences[0]
    varied = np.where(sample.mask, np.arange(len(sample.mask), dtype=np.float32), np.float32(0))
    sequences = [replace(sample, columns={**sample.columns, "advantage": varied}), batch.sequences[1]]
    changed: TrainingBatch = replace(batch, sequences=sequences)
    (record,) = step_records(groups, changed, decode)
    assert record["rollouts"][0]["advantage"] == 3.0 and record["rollouts"][0]["advantages"] == [2.0, 4.0]


def test_every_turn_is_a_text_of_its_own_marked_as_sampled_or_given() -> None:
    task = Task("t", [7, 8], "prompt", "!")
    completion = Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")
    one_turn = Rollout.from_turn(turn(0, 0, task.tokens), completion)
    row = TrajectoryRow(
        np.array([7, 8, 1, 2, 30, 31, 5], np.int32),
        np.array([0, 0, 1, 1, 0, 0, 1], np.bool_),
        np.zeros(7, np.float32),
        np.array([-1, -1, 3, 3, -1, -1, 4], np.int32),
        np.array([-1, -1, 0, 0, -1, -1, 1], np.int16),
    )
    two_turns = replace(one_turn, rows=[row], score=Score(0.5, {"exact": 0.0, "form": 1.0}, None, False))
    (record,) = group_records([RolloutGroup(task, [two_turns])], decode)
    (rollout,) = record["rollouts"]
    assert rollout["text"] == [("1 2", True), ("30 31", False), ("5", True)]
    assert "exact" not in record and rollout["versions"] == {"3": 2, "4": 1} and rollout["tokens"] == 3
    assert rollout["rewards"] == {"exact": 0.0, "form": 1.0} and rollout["right"] is False


def test_exact_tokens_come_back_bit_for_bit_with_their_log_probs_and_versions() -> None:
    draws = np.random.default_rng(0)
    groups = []
    for name in ("a", "b"):
        rollouts = []
        for index, lengths in enumerate([(9,), (), (5, 300)]):
            rows = []
            for length in lengths:
                sampled = draws.random(length) < 0.5
                log_probs = np.where(sampled, -draws.exponential(1, length), 0).astype(np.float32)
                versions = np.where(sampled, draws.integers(0, 3, length), -1).astype(np.int32)
                tokens = draws.integers(0, 250_000, length).astype(np.int32)
                rows.append(TrajectoryRow(tokens, sampled, log_probs, versions, np.zeros(length, np.int16)))
            completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
            rollouts.append(replace(Rollout.from_turn(turn(index, 0, [7]), completion), rows=rows))
        groups.append(RolloutGroup(Task(name, [7], "", "!"), rollouts))
    for group, record in zip(groups, group_records(groups, decode, "kept")):
        unpacked = unpack(json.loads(json.dumps(record)))
        assert unpacked is not None and [len(rows) for rows in unpacked] == [1, 0, 2]
        for rollout, rows in zip(group.rollouts, unpacked):
            for before, after in zip(rollout.rows, rows, strict=True):
                for column in ("tokens", "sampled", "log_probs", "versions"):
                    assert getattr(after, column).tobytes() == getattr(before, column).tobytes(), column
                assert np.concatenate([after.tokens[span] for span in after.spans()]).tolist() == before.tokens.tolist()


def test_tokens_of_a_file_of_an_earlier_version_are_none_and_damaged_ones_an_error() -> None:
    assert unpack({"rollouts": []}) is None
    (record,) = group_records([make_group("a", [0.0, 1.0])], decode, "kept")
    for damage in ({"tokens": "AAAA"}, {"tokens": record["exact"]["sampled"]}, {"rows": None}):
        with pytest.raises(ValueError, match="exact: "):
            unpack({**record, "exact": {**record["exact"], **damage}})


def test_a_rollout_that_began_otherwise_than_its_task_is_shown_whole() -> None:
    task = Task("t", [7, 8], "prompt", "!")
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "length")
    other = Rollout.from_turn(turn(0, 0, [7, 9]), completion)
    (record,) = group_records([RolloutGroup(task, [other])], decode)
    assert record["rollouts"][0]["text"] == [("7 9", False), ("1", True)]
