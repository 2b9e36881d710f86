"""A rollout's seed depends only on its identity, and completions can be packed into arrays and back."""

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.requests import FINISHES, Completion, PackedCompletions, Purpose, RolloutId, rollout_seed

PURPOSES: tuple[Purpose, ...] = ("train", "validation", "parity")
numbers = st.integers(0, 2**31 - 1)


def rollout(purpose: Purpose, group: int, index: int = 0, attempt: int = 0) -> RolloutId:
    return RolloutId(purpose, "e0-r1", group, index, attempt)


@given(numbers, st.sampled_from(PURPOSES), st.integers(0, 2**40), st.integers(1, 64), st.integers(0, 512))
def test_the_same_identity_gives_the_same_seed_whatever_its_task_is_called(
    run: int, purpose: Purpose, group: int, size: int, index: int
) -> None:
    rollout_id = rollout(purpose, group, index)
    seed = rollout_seed(run, rollout_id, size)
    assert seed == rollout_seed(run, replace(rollout_id, task="e9-r9"), size)
    assert type(seed) is int and 0 <= seed < 2**30 + 512
    assert seed == rollout_seed(run, rollout(purpose, group), size) + index


def test_runs_purposes_attempts_steps_and_tasks_do_not_share_seeds() -> None:
    attempts: list[tuple[Purpose, int]] = [("train", 0), ("validation", 0), ("parity", 0), ("train", 1)]
    seeds = [
        rollout_seed(run, rollout(purpose, group, attempt=attempt), 64)
        for run, (purpose, attempt), group in product((0, 1), attempts, range(128))
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 128


def test_seeds_are_the_same_in_every_release() -> None:
    # Step 1 of run 0, first three tasks of three, then of many.
    assert [rollout_seed(0, rollout("train", group), 3) for group in range(3)] == EXPECTED
    assert [rollout_seed(0, rollout("train", group), 64) for group in range(3)] == EXPECTED
    assert [rollout_seed(0, rollout("validation", 3 + place), 3) for place in range(3)] == VALIDATION
    assert [rollout_seed(0, rollout("train", group, attempt=1), 3) for group in range(3)] == RESAMPLED


EXPECTED = [957800432, 503449828, 897492771]
VALIDATION = [225310803, 180932590, 428827169]
RESAMPLED = [919817235, 247096828, 534995179]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_columns_give_every_completion_back_whole(lengths: list[int]) -> None:
    rows = [
        Completion(
            np.full(length, row, np.int32),
            np.full(length, -row, np.float32),
            np.full(length, 2 * row, np.int32),
            FINISHES[row % 3],
        )
        for row, length in enumerate(lengths)
    ]
    columns = PackedCompletions.pack(rows)
    assert (columns.tokens.dtype, columns.log_probs.dtype, columns.versions.dtype) == (np.int32, np.float32, np.int32)
    assert len(columns.tokens) == sum(lengths)
    for completion, unpacked in zip(rows, columns.unpack(), strict=True):
        assert completion.finish == unpacked.finish
        for name in ("tokens", "log_probs", "versions"):
            assert getattr(completion, name).tolist() == getattr(unpacked, name).tolist()


def test_further_columns_stay_with_their_completions() -> None:
    widths = (None, 2, 0, 3, 2)
    rows = []
    for index, width in enumerate(widths):
        length = index + 1
        columns = {} if width is None else {"top_ids": np.full((length, width), index, np.int32)}
        zeros = np.zeros(length, np.int32)
        rows.append(Completion(zeros, np.zeros(length, np.float32), zeros, "length", columns))
    packed = PackedCompletions.pack(rows)
    for completion, unpacked in zip(rows, packed.unpack(), strict=True):
        assert completion.columns.keys() == unpacked.columns.keys()
        for name, values in completion.columns.items():
            assert np.array_equal(values, unpacked.columns[name]) and values.dtype == unpacked.columns[name].dtype
    assert rows[4].shorten(2).columns["top_ids"].shape == (2, 2)
