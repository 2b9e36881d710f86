"""Ray's own processes are looked after: those of this Ray, not what an attempt before it has left."""

import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlctl.launch.local_ray import _NEEDED, _watched
from tests.waiting import until


def sleeper(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A child process of that name."""
    program = shutil.which("sleep")
    assert program
    if not (folder / name).exists():
        (folder / name).symlink_to(program)
    return subprocess.Popen([folder / name, "600"])


def test_the_ended_processes_of_a_first_attempt_are_not_missed(tmp_path: Path) -> None:
    if Path(shutil.which("sleep") or "").resolve().name != "sleep":
        pytest.skip("sleep is one of many programs in one file here")
    first = [sleeper(tmp_path, name) for name in _NEEDED]
    for each in first:
        each.kill()
        until(lambda each=each: psutil.Process(each.pid).status() == psutil.STATUS_ZOMBIE)
    second, lost = [sleeper(tmp_path, name) for name in _NEEDED], list[str]()
    try:
        with _watched(lost.append):
            time.sleep(1.2)
            assert lost == []
            second[0].kill()
            until(lambda: lost)
        assert lost == [f"Ray's gcs_server (process {second[0].pid}) is gone"]
    finally:
        for each in (*first, *second):
            each.kill()
            each.wait()
