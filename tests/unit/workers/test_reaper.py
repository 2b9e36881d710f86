"""Leftovers of a driver killed together with its reaper, and files that nobody may remove."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlctl.preflight.doctor import check_leftovers
from rlctl.workers import reaper
from rlctl.workers.reaper import leftovers, sweep
from tests.waiting import until

DRIVER = """
import json, subprocess, sys, time
from rlctl.workers.reaper import Reaper
reaper = Reaper()
folder = reaper.make("rlctl-", sys.argv[1])
(folder / "weights").write_bytes(b"1" * 2**20)
# One of the run's processes, which holds no file open.
user = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"TMPDIR": str(folder)})
print(json.dumps([str(folder), user.pid]), flush=True)
time.sleep(600)
"""


@contextmanager
def start_driver(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path, psutil.Process]]:
    """Start a process with a folder, and another process that works there."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    folder, user = json.loads(process.stdout.readline())
    child = psutil.Process(int(user))
    try:
        yield process, Path(folder), child
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
        process.kill()
        process.wait()


def reapers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    reapers = []
    for child in psutil.Process(process.pid).children(True):
        with suppress(psutil.NoSuchProcess):
            if "reaper.py" in " ".join(child.cmdline()):
                reapers.append(child)
    return reapers


def kill_with_reaper(process: "subprocess.Popen[str]") -> None:
    until(lambda: len(reapers_of(process)) == 2)
    for reaper_half in reapers_of(process):
        # The one half ends with the other.
        with suppress(psutil.NoSuchProcess):
            reaper_half.kill()
    process.kill()
    process.wait()


def test_folders_and_processes_of_a_driver_killed_with_its_reaper_are_named_and_removed(tmp_path: Path) -> None:
    with start_driver(tmp_path) as (process, folder, user), start_driver(tmp_path) as (_, living, _):
        assert leftovers([tmp_path]) == []
        kill_with_reaper(process)
        (leftover,) = leftovers([tmp_path])
        assert leftover.path == folder
        assert leftover.owner == f"process {process.pid}"
        assert [pid for pid, _ in leftover.processes] == [user.pid]
        assert f"{folder} (1.0 MiB, in use by {user.name()} {user.pid}) of process {process.pid}" == str(leftover)
        (row,) = check_leftovers([tmp_path])
        assert (row.state, row.found) == ("warning", str(leftover))
        sweep([leftover.path])
        user.wait(300)
        assert not folder.exists()
        assert living.exists()
    # If the driver is killed alone, the reaper removes the folder.
    until(lambda: not living.exists())


# A path with a newline was once read as two.
HOSTILE = "kept\nof two lines/quote's \" $(id) `id` \\ */-rf not-utf8-\udcff\udcfe Ünï☃ "


def test_a_killed_drivers_folder_is_removed_whatever_its_name_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / HOSTILE
    root.mkdir(parents=True)
    for other in (tmp_path / "kept", Path(str(root).strip()), Path(f"{root}2")):
        other.mkdir()
        (other / "precious").touch()
    with start_driver(root) as (process, folder, user):
        assert folder.parent == root and leftovers([root]) == []
        process.kill()
        process.wait()
        until(lambda: not folder.exists())
        user.wait(60)
    assert root.exists() and len(list(tmp_path.glob("**/precious"))) == 3


def test_a_message_that_a_killed_driver_tore_names_no_folder() -> None:
    paths = [Path("/tmp/rlctl-a"), Path(f"/tmp/{HOSTILE}")]
    message = b"".join(map(reaper.encode_path, paths))
    assert list(reaper.decode_paths(message)) == paths
    assert [list(reaper.decode_paths(message[:end])) for end in (len(message) - 1, 3, 0)] == [paths[:1], [], []]


def test_what_is_not_surely_a_dead_drivers_of_this_user_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rlctl-of-an-earlier-version").mkdir(0o700)
    (tmp_path / "rlctl-open-to-others").mkdir()
    (tmp_path / "rlctl-open-to-others").chmod(0o755)
    (tmp_path / "rlctl-open-to-others" / ".owner").touch()
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "elsewhere" / ".owner").touch()
    (tmp_path / "rlctl-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "rlctl-file").touch()
    if os.geteuid() == 0:
        foreign = tmp_path / "rlctl-of-somebody-else"
        foreign.mkdir(0o700)
        (foreign / ".owner").touch()
        os.chown(foreign, 65534, 65534)
    assert leftovers([tmp_path]) == []


SCRATCH = """
import sys, time
from rlctl.workers.reaper import scratch_folder
with scratch_folder("rlctl-model-") as folder:
    (folder / "engine.log").write_text("1")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed_leaves_no_scratch_folder(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        assert (folder / "engine.log").is_file()
        process.send_signal(number)
    until(lambda: not folder.exists())
    with reaper.scratch_folder("rlctl-model-") as folder:
        assert folder.is_dir()
    assert not folder.exists()
