"""Ray's own processes are looked after: those of this Ray, not what an attempt before it has left."""

import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlctl.launch.local_ray import _NEEDED, _watched


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
        while psutil.Process(each.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    second, lost = [sleeper(tmp_path, name) for name in _NEEDED], list[str]()
    try:
        with _watched(lost.append):
            time.sleep(1.2)
            assert lost == []
            second[0].kill()
            end = time.monotonic() + 20
            while not lost and time.monotonic() < end:
                time.sleep(0.05)
        assert lost == [f"Ray's gcs_server (process {second[0].pid}) is gone"]
    finally:
        for each in (*first, *second):
            each.kill()
            each.wait()
