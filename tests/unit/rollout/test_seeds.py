"""Seeds depend on the run's seed, the stream, the step and the place alone: a resumed run draws what it would have."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rlctl.rollout.seeds import PROBE, TRAIN, VALIDATION, rollout_seeds

STREAMS = (TRAIN, VALIDATION, PROBE)
numbers = st.integers(0, 2**31 - 1)


@given(numbers, st.sampled_from(STREAMS), numbers, st.integers(0, 64))
def test_the_same_arguments_give_the_same_seeds_with_room_for_a_groups_offsets(
    seed: int, stream: int, step: int, count: int
) -> None:
    drawn = rollout_seeds(seed, stream, step, count)
    assert drawn == rollout_seeds(seed, stream, step, count)
    assert len(drawn) == count
    assert all(type(value) is int and 0 <= value < 2**30 for value in drawn)


def test_runs_streams_steps_and_prompts_do_not_share_seeds() -> None:
    drawn = [
        value
        for seed, stream, step in product((0, 1), STREAMS, (1, 2))
        for value in rollout_seeds(seed, stream, step, 64)
    ]
    assert len(set(drawn)) == len(drawn) == 12 * 64


def test_a_prompt_keeps_its_seed_when_more_are_drawn_behind_it() -> None:
    assert rollout_seeds(7, TRAIN, 3, 64)[:8] == rollout_seeds(7, TRAIN, 3, 8)


def test_seeds_are_the_same_in_every_release() -> None:
    assert rollout_seeds(0, TRAIN, 1, 3) == EXPECTED


EXPECTED = [957800432, 503449828, 897492771]
