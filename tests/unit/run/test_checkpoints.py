"""Checkpoints appear whole or not at all; the newest and the best stay."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.run.checkpoints import CheckpointError, Checkpoints, hold
from rlctl.workers.errors import WorkerDied


def write_parts(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights").write_text("w")


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6), (5, None)):
        checkpoints.save(step, {"score": score}, write_parts)
    assert list_names(tmp_path) == ["step_2", "step_4", "step_5"]
    latest = checkpoints.latest()
    assert latest is not None and (latest.step, latest.state["score"]) == (5, None)
    assert (latest.trainer / "weights").read_text() == "w"


def test_a_checkpoint_that_another_process_reads_stays_until_it_has_ended(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    checkpoints.save(1, {}, write_parts)
    program = f"import pathlib, rlctl.run.checkpoints as c; print(c.hold(pathlib.Path({str(tmp_path / 'step_1')!r})))"
    command = [sys.executable, "-c", f"{program}; print(flush=True); input()"]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout and reader.stdout.readline() == "True\n" and reader.stdout.readline() == "\n"
    for step in (2, 3):
        checkpoints.save(step, {}, write_parts)
    assert list_names(tmp_path) == ["step_1", "step_3"] and not hold(tmp_path / "step_2")
    reader.communicate("\n")
    checkpoints.save(4, {}, write_parts)
    assert list_names(tmp_path) == ["step_4"]


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_checkpoint_that_cannot_be_locked_or_is_gone_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    checkpoints.save(1, {}, write_parts)
    real_open = os.open

    def open_file(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_RDWR and Path(path) == tmp_path / "step_1/state.json":
            if error is FileNotFoundError:
                (tmp_path / "step_1").rename(tmp_path / "tmp_gone")
            raise error(path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_file)
    checkpoints.save(2, {}, write_parts)
    assert list_names(tmp_path) == ["step_2"]


def test_of_equal_scores_the_earlier_is_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1)):
        checkpoints.save(step, {"score": score}, write_parts)
    assert list_names(tmp_path) == ["step_2", "step_4"]


def test_a_checkpoint_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)

    def write_and_look(folder: Path) -> None:
        write_parts(folder)
        assert list_names(tmp_path) == ["tmp_step_1"]
        assert checkpoints.latest() is None

    assert checkpoints.save(1, {"cursor": {"row": 3}}, write_and_look).path == tmp_path / "step_1"
    latest = checkpoints.latest()
    assert latest is not None and latest.state["cursor"] == {"row": 3}
    assert json.loads((latest.path / "state.json").read_text()) == {"step": 1, "cursor": {"row": 3}}


def test_a_step_saved_again_replaces_the_older_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, lambda folder: _write_note(folder, "old"))
    checkpoints.save(1, {}, lambda folder: _write_note(folder, "new"))
    assert list_names(tmp_path) == ["step_1"]
    assert (tmp_path / "step_1" / "note").read_text() == "new"


def test_a_worker_that_dies_while_it_saves_stays_a_lost_worker(tmp_path: Path) -> None:
    """Raise the death itself: after it a run goes on from the checkpoint before. A failed save ends the run."""
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, write_parts)

    def write_and_die(folder: Path) -> None:
        write_parts(folder)
        raise WorkerDied("save", ["trainer-1"], "its process is gone")

    with pytest.raises(WorkerDied):
        checkpoints.save(2, {}, write_and_die)
    assert list_names(tmp_path) == ["step_1"]


def _write_note(folder: Path, text: str) -> None:
    (folder / "note").write_text(text)


def test_what_is_pruned_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    checkpoints.save(1, {}, write_parts)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _interrupt_if_path_exists)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {}, write_parts)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2]
    checkpoints.save(3, {}, write_parts)
    assert list_names(tmp_path) == ["step_3"]


def _interrupt_if_path_exists(path: Path, ignore_errors: bool) -> None:
    if path.exists():
        raise KeyboardInterrupt


def test_an_interrupt_while_writing_leaves_nothing_and_stays_an_interrupt(tmp_path: Path) -> None:
    def write_and_interrupt(folder: Path) -> None:
        write_parts(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path, keep_last=1, keep_best=0).save(1, {}, write_and_interrupt)
    assert list_names(tmp_path) == []


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1 .* not JSON serializable"):
        Checkpoints(tmp_path, keep_last=1, keep_best=0).save(1, {"cursor": object()}, write_parts)
    assert list_names(tmp_path) == []


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "never", keep_last=1, keep_best=0).latest() is None


def test_a_failing_write_leaves_nothing_and_says_which_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, write_parts)

    def write_and_fail(folder: Path) -> None:
        write_parts(folder)
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match=f"no checkpoint of step 2 in {tmp_path}: No space left on device"):
        checkpoints.save(2, {}, write_and_fail)
    assert list_names(tmp_path) == ["step_1"]


def test_what_a_kill_cut_off_is_never_read_and_goes_with_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    checkpoints.save(1, {}, write_parts)
    (tmp_path / "tmp_step_2").mkdir()
    (tmp_path / "step_3").mkdir()
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    checkpoints.save(4, {}, write_parts)
    assert "tmp_step_2" not in list_names(tmp_path)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9, keep_best=0)
    for step in (9, 10, 100):
        checkpoints.save(step, {}, write_parts)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [9, 10, 100]
