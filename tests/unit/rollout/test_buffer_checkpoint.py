"""Groups that wait for their step survive a checkpoint to the last bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.requests import Completion
from rlctl.rewards.scorer import Score
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups
from rlctl.rollout.types import PlayedEpisode, Rollout
from rlctl.run.checkpoints import EarlierVersion
from tests.turns import turn


def make_rollout(group: int, index: int, length: int, version: int, score: Score | None) -> Rollout:
    numbers = np.arange(length, dtype=np.int32)
    log_probs = (-numbers / 3).astype(np.float32)
    completion = Completion(numbers, log_probs, np.full(length, version, np.int32), "length")
    sampled = Rollout.from_turn(turn(group, index, [9] * group), completion)
    return replace(sampled, score=score)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    right = Score(1.0, {"exact": 1.0}, None, True)
    failed = Score(None, {"exact": None}, "exact: raised", False)
    groups = {
        7: [make_rollout(7, 0, 3, 1, right), make_rollout(7, 1, 5, 2, right)],
        9: [make_rollout(9, 0, 1, 4, failed)],
        11: [],
    }
    save_groups(tmp_path, groups)
    loaded = load_groups(tmp_path)
    assert list(loaded) == [7, 9, 11]
    for number, rollouts in groups.items():
        for saved_rollout, loaded_rollout in zip(rollouts, loaded[number], strict=True):
            for name in ("id", "finish", "score"):
                assert getattr(saved_rollout, name) == getattr(loaded_rollout, name)
            for name in ("tokens", "sampled", "log_probs", "versions"):
                saved_array = getattr(saved_rollout, name)
                loaded_array = getattr(loaded_rollout, name)
                assert saved_array.dtype == loaded_array.dtype
                assert np.array_equal(saved_array, loaded_array)


def test_an_episode_keeps_its_rows_its_conversation_and_its_failure(tmp_path: Path) -> None:
    played_rollout = make_rollout(1, 0, 3, 1, None)
    failed_rollout = make_rollout(1, 1, 5, 2, None)
    messages = [{"role": "user", "content": "1-9="}, {"role": "assistant", "content": "7 \u00fc"}]
    played = PlayedEpisode(messages, 1, "done", 2, {"right": 1.0}, None, 1, 0.25, 3, 1)
    failed = PlayedEpisode([], 0, "failed", 0, None, "died: its process ended", 3, 1.5, 0, 0)
    episodes = [
        replace(played_rollout, rows=(played_rollout.rows[0], failed_rollout.rows[0]), episode=played),
        replace(failed_rollout, rows=(), episode=failed),
    ]
    save_groups(tmp_path, {3: episodes})
    (first, second) = load_groups(tmp_path)[3]
    assert (first.episode, second.episode) == (played, failed)
    assert [row.tokens.tolist() for row in first.rows] == [row.tokens.tolist() for row in episodes[0].rows]
    assert [row.turns.dtype for row in first.rows] == [np.int16, np.int16] and not second.rows


def test_no_groups_and_no_files(tmp_path: Path) -> None:
    assert load_groups(tmp_path) == {}
    save_groups(tmp_path, {})
    assert load_groups(tmp_path) == {}


def test_groups_of_an_earlier_version_are_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    np.savez(folder / "groups.npz", group_ids=np.zeros(1))
    with pytest.raises(EarlierVersion, match="earlier version of rlctl"):
        load_groups(folder)
