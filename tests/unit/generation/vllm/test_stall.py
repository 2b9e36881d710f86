"""The stall of a change of weights: the longest gap that touches it, beyond the ordinary gap."""

import pytest

from rlctl.generation.vllm.active_requests import stall


@pytest.mark.parametrize(
    ("steps", "begin", "end", "expected"),
    [
        ([0.0, 1.0, 2.0, 5.0, 6.0], 2.5, 4.5, 2.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 1.5, 3.5, 0.0),
        ([0.0, 1.0, 2.0, 3.0, 7.0], 1.5, 2.5, 0.0),
        ([0.0, 10.0, 11.0, 12.0], 10.5, 11.5, 0.0),
        ([], 1.0, 2.0, 0.0),
        ([1.0], 2.0, 3.0, 0.0),
        ([1.0, 2.0], 3.0, 4.0, 0.0),
    ],
    ids=["a pause", "no pause", "a gap afterwards", "slow before", "idle", "one step", "nothing after"],
)
def test_stall(steps: list[float], begin: float, end: float, expected: float) -> None:
    assert stall(steps, begin, end) == expected
