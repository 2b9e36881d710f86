"""The copy of a run directory here, of one that grows elsewhere: the real program, on this machine."""

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


def program(there: Path, here: Path, follow: bool) -> "subprocess.Popen[str]":
    texts = {name: (here / name).read_bytes() for name in FILES if (here / name).is_file()}
    have = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
    request = {"folder": str(there), "files": FILES, "have": have, "follow": follow}
    return Host("").follow("mirror.run", request, stdout=subprocess.PIPE)


def copy(there: Path, here: Path) -> None:
    watch.copy_until(program(there, here, follow=False), here, threading.Event(), time.monotonic() + 60)


def folders(tmp_path: Path) -> tuple[Path, Path]:
    there = tmp_path / "there"
    here = tmp_path / "here"
    there.mkdir()
    here.mkdir()
    return there, here


def test_a_copy_grows_where_it_stood_and_follows_a_file_that_was_replaced(tmp_path: Path) -> None:
    there, here = folders(tmp_path)
    (there / "events.jsonl").write_text('{"step": 1}\n')
    copy(there, here)
    assert not (here / "metrics.jsonl").exists()
    copied = (here / "events.jsonl").stat().st_ino
    with (there / "events.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    copy(there, here)
    assert (here / "events.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    # A reader in the middle of the text is not thrown back.
    assert (here / "events.jsonl").stat().st_ino == copied

    shorter = there / "new"
    shorter.write_text('{"step": 9}\n')
    shorter.replace(there / "events.jsonl")
    copy(there, here)
    assert (here / "events.jsonl").read_text() == '{"step": 9}\n'


def test_while_it_follows_what_is_added_and_cut_arrives(tmp_path: Path) -> None:
    there, here = folders(tmp_path)
    stop = threading.Event()
    thread = threading.Thread(
        target=watch.copy_until, args=(program(there, here, follow=True), here, stop, None), daemon=True
    )
    thread.start()
    for text in ("one\n", "one\ntwo\n", "cut\n", "cut\nmore\n"):
        temporary = there / "temporary"
        temporary.write_text(text)
        temporary.replace(there / "metrics.jsonl")
        end = time.monotonic() + 60
        while not (here / "metrics.jsonl").exists() or (here / "metrics.jsonl").read_text() != text:
            assert time.monotonic() < end, text
            time.sleep(0.02)
    stop.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_one_process_at_a_time_brings_a_runs_files(tmp_path: Path) -> None:
    with try_lock(tmp_path) as first, try_lock(tmp_path) as second:
        assert (first, second) == (True, False)
    with try_lock(tmp_path) as again:
        assert again


def test_a_job_is_remembered_in_the_run_directory(tmp_path: Path) -> None:
    assert JobRecord.read(tmp_path) is None
    record = JobRecord("lab", "mine-1", "/work", 2, remote="/there/mine")
    record.write(tmp_path)
    assert JobRecord.read(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    assert json.loads((tmp_path / "job.json").read_text())["cluster"] == "lab"


def test_a_file_that_was_emptied_is_empty_here_before_it_grows_again(tmp_path: Path) -> None:
    there, here = folders(tmp_path)
    (there / "metrics.jsonl").write_text("old\n")
    copy(there, here)
    emptied = there / "new"
    emptied.touch()
    stop = threading.Event()
    process = program(there, here, follow=True)
    thread = threading.Thread(target=watch.copy_until, args=(process, here, stop, None), daemon=True)
    thread.start()
    emptied.replace(there / "metrics.jsonl")
    end = time.monotonic() + 60
    while (here / "metrics.jsonl").read_text() != "":
        assert time.monotonic() < end
        time.sleep(0.02)
    stop.set()
    thread.join(timeout=60)


@pytest.mark.parametrize("ending", ["watch_job", "mirror"])
def test_a_thread_that_fails_is_why_nothing_more_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("status")

    state: Any = None
    monkeypatch.setattr(watch, "_JOB_POLL_S", 0.01)
    monkeypatch.setattr(watch, "ask", broken)
    monkeypatch.setattr(watch, "try_lock", broken)
    followed = watch.ClusterRun(run=tmp_path, record=JobRecord("lab", "job-1", "/work", remote="/far"), state=state)
    followed.follow_in_thread(getattr(followed, ending), threading.Event())
    assert followed.is_lost() and followed.lost == "lab can no longer be followed: KeyError: 'status'"
