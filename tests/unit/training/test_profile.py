"""A profile's busy time: time in which several streams work at once counts once."""

import pytest

from rlctl.training.profile import covered_time


@pytest.mark.parametrize(
    ("spans", "covered"),
    [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5)], 4), ([(4, 5), (0, 10)], 10), ([(0, 1), (2, 3), (2, 3)], 2)],
)
def test_work_on_several_streams_counts_once(spans: list[tuple[float, float]], covered: float) -> None:
    assert covered_time(spans) == covered
