"""Which version sampled which token: exact at every change of weights, however many and whenever."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.active_requests import TokenVersions


def test_a_rollout_that_sees_two_changes_carries_three_versions() -> None:
    boundaries = TokenVersions()
    boundaries.begin("r0", version=4)
    boundaries.begin("r1", version=4)
    boundaries.change([("r0", 3), ("r1", 1)], version=5)
    boundaries.change([("r0", 4)], version=6)
    assert boundaries.end("r0", 6).tolist() == [4, 4, 4, 5, 6, 6]
    assert boundaries.end("r1", 2).tolist() == [4, 5]


def test_a_change_at_the_last_token_and_before_the_first_leaves_one_version() -> None:
    boundaries = TokenVersions()
    boundaries.begin("r", version=0)
    boundaries.change([("r", 0)], version=1)
    boundaries.change([("r", 3)], version=2)
    assert boundaries.end("r", 3).tolist() == [1, 1, 1]


def test_a_token_in_flight_at_a_change_that_is_thrown_away_counts_for_nobody() -> None:
    boundaries = TokenVersions()
    boundaries.begin("r", version=0)
    boundaries.change([("r", 5)], version=1)
    assert boundaries.end("r", 4).tolist() == [0, 0, 0, 0]


def test_a_rollout_that_is_forgotten_leaves_the_others() -> None:
    boundaries = TokenVersions()
    boundaries.begin("r", version=0)
    boundaries.begin("rr", version=0)
    boundaries.forget("r")
    boundaries.change([("rr", 1)], version=1)
    assert boundaries.end("rr", 2).tolist() == [0, 1]


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 10))
def test_versions_never_fall_and_every_token_has_the_one_that_was_live(steps: list[int], rest: int) -> None:
    boundaries, expected = TokenVersions(), []
    boundaries.begin("r", version=0)
    for version, tokens in enumerate(steps, 1):
        expected += [version - 1] * tokens
        boundaries.change([("r", len(expected))], version)
    expected += [len(steps)] * rest
    versions = boundaries.end("r", len(expected))
    assert versions.dtype == np.int32
    assert versions.tolist() == expected
