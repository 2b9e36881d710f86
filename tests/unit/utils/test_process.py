"""A start-up collects garbage less often, and leaves the collector as it was."""

import gc

import pytest

from rlctl.utils.process import fewer_collections


def test_garbage_is_collected_less_often_within_the_block_and_as_before_after_it() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(*(before := (700, 10, 10)))
    with pytest.raises(ValueError, match="as a start-up may"), fewer_collections():
        within = gc.get_threshold()
        assert gc.isenabled() and within[0] > 10 * before[0] and within[1:] == before[1:]
        raise ValueError("fails, as a start-up may")
    assert gc.get_threshold() == before
    gc.set_threshold(*usual)
