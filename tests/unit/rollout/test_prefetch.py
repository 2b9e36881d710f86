"""The prefetch target: as many groups in the buffer as keep the trainer busy, and never more than the bound."""

import pytest

from rlctl.rollout.prefetch import STEPS, AdaptivePrefetch


def note_steps(prefetch: AdaptivePrefetch, steps: int, waited: float, complete: int) -> int:
    """Report some steps to `prefetch`. Return the target after these steps."""
    for _ in range(steps):
        prefetch.note_step(waited, complete)
    return prefetch.target


def test_a_trainer_that_never_waits_gets_no_more_than_one_step_ahead() -> None:
    assert note_steps(AdaptivePrefetch(8, 40, adaptive=True), 50, waited=0.0, complete=8) == 16


def test_a_trainer_that_waits_gets_all_that_the_bound_allows() -> None:
    prefetch = AdaptivePrefetch(8, 40, adaptive=True)
    assert note_steps(prefetch, 1, waited=0.1, complete=0) == 20
    assert note_steps(prefetch, 50, waited=0.1, complete=0) == 40


def test_what_is_left_over_step_after_step_is_drawn_no_more() -> None:
    prefetch = AdaptivePrefetch(8, 40, adaptive=True)
    note_steps(prefetch, 50, waited=0.1, complete=0)
    assert note_steps(prefetch, STEPS - 1, waited=0.0, complete=24) == 40
    assert note_steps(prefetch, 1, waited=0.01, complete=12) == 38
    assert note_steps(prefetch, 50 * STEPS, waited=0.0, complete=24) == 16


def test_a_resumed_run_goes_on_where_it_was_as_far_as_the_bound_allows() -> None:
    prefetch = AdaptivePrefetch(8, 24, adaptive=True)
    for target, expected in ((40, 24), (20, 20), (8, 16)):
        prefetch.resume(target)
        assert prefetch.target == expected


@pytest.mark.parametrize(("capacity", "adaptive"), [(8, True), (16, True), (40, False)])
def test_where_there_is_no_choice_there_is_no_change(capacity: int, adaptive: bool) -> None:
    prefetch = AdaptivePrefetch(8, capacity, adaptive=adaptive)
    assert note_steps(prefetch, 20, waited=0.5, complete=0) == capacity
    assert note_steps(prefetch, 20, waited=0.0, complete=99) == capacity
