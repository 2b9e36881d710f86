"""A local mirror of a run directory that grows on another machine. The real program runs here, on one machine."""

import hashlib
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlctl.cluster.hosts import Host
from rlctl.cluster.jobs import watch
from rlctl.cluster.state import try_lock
from rlctl.run.run_dir import JobRecord

FILES = ("events.jsonl", "metrics.jsonl")


def start_mirror(original: Path, mirror: Path, follow: bool) -> "subprocess.Popen[str]":
    """Start the program that copies new bytes of the original directory to its mirror."""
    texts = {name: (mirror / name).read_bytes() for name in FILES if (mirror / name).is_file()}
    have = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
    request = {"folder": str(original), "files": FILES, "have": have, "follow": follow}
    return Host("").follow("mirror.run", request, stdout=subprocess.PIPE)


def copy_once(original: Path, mirror: Path) -> None:
    process = start_mirror(original, mirror, follow=False)
    watch.copy_until(process, mirror, threading.Event(), time.monotonic() + 60)


def make_folders(tmp_path: Path) -> tuple[Path, Path]:
    """Make and return the folders of an original and its mirror."""
    original = tmp_path / "original"
    mirror = tmp_path / "mirror"
    original.mkdir()
    mirror.mkdir()
    return original, mirror


def test_a_copy_grows_where_it_stood_and_follows_a_file_that_was_replaced(tmp_path: Path) -> None:
    original, mirror = make_folders(tmp_path)
    (original / "events.jsonl").write_text('{"step": 1}\n')
    copy_once(original, mirror)
    assert not (mirror / "metrics.jsonl").exists()
    inode = (mirror / "events.jsonl").stat().st_ino
    with (original / "events.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    copy_once(original, mirror)
    assert (mirror / "events.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    # A reader in the middle of the text is not thrown back.
    assert (mirror / "events.jsonl").stat().st_ino == inode

    shorter = original / "new"
    shorter.write_text('{"step": 9}\n')
    shorter.replace(original / "events.jsonl")
    copy_once(original, mirror)
    assert (mirror / "events.jsonl").read_text() == '{"step": 9}\n'


def test_while_it_follows_what_is_added_and_cut_arrives(tmp_path: Path) -> None:
    original, mirror = make_folders(tmp_path)
    stop = threading.Event()
    process = start_mirror(original, mirror, follow=True)
    thread = threading.Thread(target=watch.copy_until, args=(process, mirror, stop, None), daemon=True)
    thread.start()
    for text in ("one\n", "one\ntwo\n", "cut\n", "cut\nmore\n"):
        temporary = original / "temporary"
        temporary.write_text(text)
        temporary.replace(original / "metrics.jsonl")
        end = time.monotonic() + 60
        while not (mirror / "metrics.jsonl").exists() or (mirror / "metrics.jsonl").read_text() != text:
            assert time.monotonic() < end, text
            time.sleep(0.02)
    stop.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_one_process_at_a_time_brings_a_runs_files(tmp_path: Path) -> None:
    with try_lock(tmp_path) as first_is_locked, try_lock(tmp_path) as second_is_locked:
        assert first_is_locked and not second_is_locked
    with try_lock(tmp_path) as is_locked:
        assert is_locked


def test_a_job_is_remembered_in_the_run_directory(tmp_path: Path) -> None:
    assert JobRecord.read(tmp_path) is None
    record = JobRecord("lab", "mine-1", "/work", 2, remote="/there/mine")
    record.write(tmp_path)
    assert JobRecord.read(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    assert json.loads((tmp_path / "job.json").read_text())["cluster"] == "lab"


def test_a_file_that_was_emptied_is_empty_here_before_it_grows_again(tmp_path: Path) -> None:
    original, mirror = make_folders(tmp_path)
    (original / "metrics.jsonl").write_text("old\n")
    copy_once(original, mirror)
    empty_file = original / "new"
    empty_file.touch()
    stop = threading.Event()
    process = start_mirror(original, mirror, follow=True)
    thread = threading.Thread(target=watch.copy_until, args=(process, mirror, stop, None), daemon=True)
    thread.start()
    empty_file.replace(original / "metrics.jsonl")
    end = time.monotonic() + 60
    while (mirror / "metrics.jsonl").read_text() != "":
        assert time.monotonic() < end
        time.sleep(0.02)
    stop.set()
    thread.join(timeout=60)


@pytest.mark.parametrize("ending", ["watch_job", "mirror"])
def test_a_thread_that_fails_is_why_nothing_more_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("status")

    state: Any = None
    monkeypatch.setattr(watch, "_JOB_POLL_S", 0.01)
    monkeypatch.setattr(watch, "ask", fail)
    monkeypatch.setattr(watch, "try_lock", fail)
    cluster_run = watch.ClusterRun(run=tmp_path, record=JobRecord("lab", "job-1", "/work", remote="/far"), state=state)
    cluster_run.follow_in_thread(getattr(cluster_run, ending), threading.Event())
    assert cluster_run.is_lost() and cluster_run.lost == "lab can no longer be followed: KeyError: 'status'"
