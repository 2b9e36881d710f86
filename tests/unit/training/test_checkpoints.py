"""Checkpoints appear whole or not at all; the newest and the best stay."""

from pathlib import Path

import pytest

from rlctl.training.checkpoints import CheckpointError, Checkpoints


def write(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights").write_text("w")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6), (5, None)):
        checkpoints.save(step, {"score": score}, write)
    assert names(tmp_path) == ["step_2", "step_4", "step_5"]
    latest = checkpoints.latest()
    assert latest is not None and (latest.step, latest.state["score"]) == (5, None)
    assert (latest.trainer / "weights").read_text() == "w"


def test_a_failing_write_leaves_nothing_and_says_which_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, write)

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match=f"no checkpoint of step 2 in {tmp_path}: No space left on device"):
        checkpoints.save(2, {}, fail)
    assert names(tmp_path) == ["step_1"]


def test_what_a_kill_cut_off_is_never_read_and_goes_with_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, write)
    (tmp_path / "tmp_step_2").mkdir()
    (tmp_path / "step_3").mkdir()
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    checkpoints.save(4, {}, write)
    assert "tmp_step_2" not in names(tmp_path)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9, keep_best=0)
    for step in (9, 10, 100):
        checkpoints.save(step, {}, write)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [9, 10, 100]
