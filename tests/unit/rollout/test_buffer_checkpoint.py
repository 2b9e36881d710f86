"""Groups that wait for their step survive a checkpoint to the last bit."""

from pathlib import Path

import numpy as np

from rlctl.generation.requests import Rollout
from rlctl.rewards.scorer import Score
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups


def completion(length: int, version: int) -> Rollout:
    numbers = np.arange(length)
    log_probs = (-numbers / 3).astype(np.float32)
    return Rollout("x", numbers.astype(np.int32), log_probs, np.full(length, version, np.int32), "length")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    groups = {
        7: ([completion(3, 1), completion(5, 2)], [Score(1.0, {"exact": 1.0}, None, True)] * 2),
        9: ([completion(1, 4)], [Score(None, {"exact": None}, "exact: raised", False)]),
        11: ([], []),
    }
    save_groups(tmp_path, groups)
    loaded = load_groups(tmp_path)
    assert list(loaded) == [7, 9, 11]
    for group_id, (completions, scores) in groups.items():
        assert loaded[group_id][1] == scores
        for one, other in zip(completions, loaded[group_id][0], strict=True):
            assert one.finish == other.finish
            for name in ("tokens", "log_probs", "versions"):
                mine, theirs = getattr(one, name), getattr(other, name)
                assert mine.dtype == theirs.dtype
                assert np.array_equal(mine, theirs)


def test_no_groups_and_no_files(tmp_path: Path) -> None:
    assert load_groups(tmp_path) == {}
    save_groups(tmp_path, {})
    assert load_groups(tmp_path) == {}
