"""Every prompt ends in exactly one state, and what is trained is what was sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema import AdvantageSection, GrpoSection, LossSection
from rlctl.data.prompts import Prompt
from rlctl.generation.requests import Completion
from rlctl.grpo.batch import Batch, Group, make_batch
from rlctl.grpo.seeds import TRAIN, VALIDATION, rollout_seeds
from rlctl.rewards.scorer import Score

LOSS = LossSection(0.2, 0.2, None, 0.0, "k3", 0.0, "token", "behaviour", None)


def config(skip: bool) -> GrpoSection:
    return GrpoSection(1, 4, 4, 1, skip, AdvantageSection("group_mean", False), LOSS)


def group(name: str, values: list[float | None]) -> Group:
    prompt = Prompt(name, [7, 8], "?", "!")
    completions = [
        Completion(name, np.full(3, i, np.int32), np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")
        for i in range(len(values))
    ]
    return Group(prompt, completions, [Score(value, {}, None, False) for value in values])


values = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=5)


@given(st.lists(values, min_size=1, max_size=8), st.booleans(), st.integers(1, 4))
def test_each_prompt_ends_once_and_shares_are_whole_groups(rows: list, skip: bool, count: int) -> None:
    groups = [group(f"p{i}", row) for i, row in enumerate(rows)]
    batch = make_batch(groups, config(skip))
    ended = [*batch.fates.trained, *(p for ids in batch.fates.filtered.values() for p in ids)]
    ended += [p for ids in batch.fates.dropped.values() for p in ids]
    assert sorted(ended) == sorted(g.prompt.id for g in groups)
    trained = [g for g in groups if g.prompt.id in batch.fates.trained]
    assert len(batch.sequences) == sum(score.value is not None for g in trained for score in g.scores)
    shares = batch.shares(count)
    assert sum(map(len, shares)) == len(batch.sequences)
    sizes = [len({batch.owners[i] for i in rows}) for rows in _rows(batch, shares)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def _rows(batch: Batch, shares: list) -> list[list[int]]:
    order = {id(sequence): index for index, sequence in enumerate(batch.sequences)}
    return [[order[id(sequence)] for sequence in share] for share in shares]


def test_rollouts_without_a_score_and_uniform_groups_say_why_they_are_missing() -> None:
    groups = [group("a", [1.0, None, 0.0]), group("b", [None, None]), group("c", [1.0, 1.0])]
    batch = make_batch(groups, config(skip=True))
    assert batch.fates.trained == ["a"]
    assert batch.fates.dropped == {"no rollout could be scored": ["b"]}
    assert batch.fates.filtered == {"all rewards equal": ["c"]}
    first, second = batch.sequences
    assert first.tokens.tolist() == [7, 8, 0, 0, 0]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert first.fields["advantage"].tolist() == pytest.approx([0, 0, 0.5, 0.5, 0.5])
    assert first.fields["behaviour_log_prob"].tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert second.tokens[-1] == 2


def test_seeds_are_reproducible_and_streams_do_not_share_them() -> None:
    assert rollout_seeds(0, TRAIN, 5, 64) == rollout_seeds(0, TRAIN, 5, 64)
    drawn = [
        *rollout_seeds(0, TRAIN, 5, 64),
        *rollout_seeds(0, TRAIN, 6, 64),
        *rollout_seeds(0, VALIDATION, 5, 64),
        *rollout_seeds(1, TRAIN, 5, 64),
    ]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) < 2**30
