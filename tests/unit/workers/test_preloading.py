"""A server imports modules once and forks Ray's workers. Whatever happens to it, workers start, and end with it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.workers.preloading import ForkServer, ImportStage, start_server
from tests.waiting import until

# A worker says which imports it has, its arguments and a variable, then waits to be told to end.
WORKER = """
import json, os, sys
modules = [name for name in ("colorsys", "cgitb") if name in sys.modules]
print(json.dumps([os.getpid(), modules, sys.argv[1:], os.environ.get("OWN")]), flush=True)
sys.stdin.read()
sys.exit(3)
"""
STAGES = [ImportStage(["colorsys"]), ImportStage(["cgitb"], {"STAGE": "second"})]


class Started:
    """A stub, or the worker that it became, and the worker's first words."""

    def __init__(self, forks: ForkServer, folder: Path) -> None:
        ray_command = [sys.executable, "/ray/setup_worker.py", str(folder / "default_worker.py"), "--a=1"]
        command = forks.command([*ray_command, "--language=PYTHON"], folder)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OWN": "mine"}
        )
        assert self.process.stdout
        self.pid, self.modules, self.arguments, self.variable = json.loads(self.process.stdout.readline())

    def end(self) -> int:
        """Tell the worker to end. Return the exit code of the stub."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(20)


def has_ended(pid: int) -> bool:
    """Return True if the process has ended. Nobody may have waited for an orphan."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "default_worker.py").write_text(WORKER)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = start_server(STAGES, folder, folder / "log", subprocess.PIPE)
    yield process
    assert process.stdin
    process.stdin.close()
    process.wait(20)


def test_each_worker_has_the_imports_of_its_stage_and_its_own_environment(
    server: "subprocess.Popen[bytes]", folder: Path
) -> None:
    forks = ForkServer(folder, [1])
    first = Started(forks, folder)
    later = [Started(forks, folder), Started(forks, folder)]
    assert first.modules == ["colorsys"] and forks.lost_stages() == []
    assert [worker.modules for worker in later] == [["colorsys", "cgitb"]] * 2
    for worker in (first, *later):
        assert worker.pid != worker.process.pid
        assert (worker.arguments, worker.variable) == (["--a=1"], "mine")
        assert worker.end() == 3


def test_a_killed_stub_takes_its_worker_along_and_a_killed_worker_its_stub(
    server: "subprocess.Popen[bytes]", folder: Path
) -> None:
    forks = ForkServer(folder)
    stub = Started(forks, folder)
    stub.process.kill()
    until(lambda: has_ended(stub.pid))
    worker = Started(forks, folder)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.process.wait(20) == 128 + signal.SIGKILL


def test_a_signal_to_the_stub_reaches_the_worker(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    worker = Started(ForkServer(folder), folder)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(20) == 128 + signal.SIGTERM
    assert has_ended(worker.pid)


@pytest.mark.parametrize("is_killed", [False, True])
def test_workers_end_with_the_server_whether_it_is_closed_or_killed(folder: Path, is_killed: bool) -> None:
    process = start_server(STAGES, folder, folder / "log", subprocess.PIPE)
    worker = Started(ForkServer(folder, [1]), folder)
    assert process.stdin
    if is_killed:
        process.kill()
    process.stdin.close()
    process.wait(20)
    until(lambda: has_ended(worker.pid))
    assert worker.process.wait(20) != 0


@pytest.mark.parametrize("fault", ["never started", "killed", "an import fails"])
def test_without_a_server_the_stub_becomes_the_worker(fault: str, folder: Path) -> None:
    forks = ForkServer(folder)
    if fault == "killed":
        process = start_server(STAGES, folder, folder / "log", subprocess.PIPE)
        process.kill()
        process.wait(20)
    if fault == "an import fails":
        start_server([ImportStage(["no_such_module"])], folder, folder / "log", subprocess.PIPE).wait(20)
        assert "No module named 'no_such_module'" in (folder / "log").read_text()
    worker = Started(forks, folder)
    assert worker.pid == worker.process.pid
    assert (worker.modules, worker.arguments) == ([], ["--a=1"])
    assert worker.end() == 3


def test_a_failed_stage_leaves_the_one_before_serving(folder: Path) -> None:
    process = start_server([STAGES[0], ImportStage(["no_such_module"])], folder, folder / "log", subprocess.PIPE)
    forks = ForkServer(folder, [1])
    forked = Started(forks, folder)
    usual = Started(forks, folder)
    assert forked.modules == ["colorsys"]
    assert usual.modules == [] and usual.pid == usual.process.pid
    assert forks.lost_stages() == ["stage-1"]
    assert (forked.end(), usual.end()) == (3, 3)
    assert process.stdin
    process.stdin.close()
    process.wait(20)


def test_a_command_of_another_form_stays_as_it_is(folder: Path) -> None:
    for command in (["python", "-s", "/ray/setup_worker.py", "default_worker.py"], ["java", "-Da=b", "Worker"]):
        assert ForkServer(folder).command(command, folder) == command
