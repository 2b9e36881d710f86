"""A private Ray: its processes are watched, a slow start is explained, and private methods may be missing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlctl.launch import local_ray as module
from rlctl.launch.local_ray import (
    _NEEDED_NAMES,
    _UNUSED,
    RayTooSlow,
    _changed_processes,
    _needed_processes,
    _watch_processes,
    _with_idle_agent,
    local_ray,
    ray_session,
)
from rlctl.run.interrupts import Interrupts

import ray  # isort: skip (Ray reads rlctl's settings at its import)
from ray import _private  # isort: skip
from tests.waiting import until


def start_sleepers(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start a child process for each name that Ray needs."""
    program = shutil.which("sleep")
    assert program
    sleepers = []
    for name in _NEEDED_NAMES:
        if not (folder / name).exists():
            (folder / name).symlink_to(program)
        sleepers.append(subprocess.Popen([folder / name, "600"]))
    return sleepers


def is_zombie(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_the_ended_processes_of_a_first_attempt_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GIVE_UP_S", 0.1)
    if Path(shutil.which("sleep") or "").resolve().name != "sleep":
        pytest.skip("sleep is one of many programs in one file here")
    ended_processes = start_sleepers(tmp_path)
    for process in ended_processes:
        process.kill()
        until(partial(is_zombie, process))
    processes = start_sleepers(tmp_path)
    messages = list[str]()
    try:
        with _watch_processes(_needed_processes(), messages.append):
            time.sleep(1.2)
            assert messages == []
            processes[0].kill()
            until(lambda: messages)
            # On a cluster a run is given up only if its node is gone too.
            with _watch_processes(_needed_processes(), messages.append, partial(messages.append, "given up")):
                time.sleep(1.2)
                processes[1].kill()
                until(lambda: "given up" in messages)
        assert messages == [
            f"Ray's gcs_server (process {processes[0].pid}) is gone",
            f"Ray's raylet (process {processes[1].pid}) is gone",
            "given up",
        ]
    finally:
        for process in [*ended_processes, *processes]:
            process.kill()
            process.wait()


def test_a_start_that_stays_too_slow_ends_with_the_key_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_folders = []

    def init(**options: Any) -> None:
        session_folders.append(Path(options["_temp_dir"]))
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    # Each reading of the clock is 15 s after the one before.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=count(0, 15).__next__))
    with pytest.raises(RayTooSlow) as error, local_ray(tmp_path, deadline_s=45):
        pass
    assert str(error.value) == (
        "Ray did not start within its own 30 s, 2 times in 30 s: this machine is too busy or too slow for it; end "
        f"other programs, or raise run.deadline_s=45. Ray's log: {tmp_path}/ray.log"
    )
    assert not any(folder.exists() for folder in session_folders)


@pytest.mark.parametrize("missing", ["a method", "the module"])
def test_a_ray_without_the_private_methods_starts_in_its_own_way(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private.node import Node

    ray_methods = {name: getattr(Node, name) for name in _UNUSED}
    if missing == "the module":
        monkeypatch.setitem(sys.modules, "ray._private.node", None)
    else:
        monkeypatch.delattr(Node, _UNUSED[0])
    with _changed_processes(None, tmp_path):
        unchanged_names = [name for name in _UNUSED if getattr(Node, name, None) is ray_methods[name]]
        expected_names = list(_UNUSED) if missing == "the module" else []
        assert unchanged_names == expected_names
    monkeypatch.undo()
    assert {name: getattr(Node, name) for name in _UNUSED} == ray_methods


def test_a_raylet_gets_idle_agents_and_keeps_what_it_has_in_another_form() -> None:
    command = "python main.py --node-id=ab --session-dir=/s/t --runtime-env-dir=/r"
    agent_option = _with_idle_agent(f"--runtime_env_agent_command={command}")
    assert agent_option.startswith(f"--runtime_env_agent_command={sys.executable} ")
    assert agent_option.endswith("/idle_agent.py /s/t ab runtime_env_agent_port")
    for option in ("--runtime_env_agent_command=python main.py", f"--python_worker_command={command}", "--head"):
        assert _with_idle_agent(option) == option


@pytest.mark.parametrize("missing", ["nothing", "the switch", "the module"])
def test_a_ray_without_its_private_switch_of_loopback_starts(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants

    switch = ray_constants.ENABLE_RAY_CLUSTER
    calls: list[object] = []

    def read_switch() -> object:
        return getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)

    monkeypatch.setattr(ray, "init", lambda **options: calls.append(read_switch()))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shut down"))
    if missing == "the module":
        monkeypatch.delattr("ray._private.ray_constants")
        monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    elif missing == "the switch":
        monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    with ray_session(tmp_path, loopback=True):
        assert read_switch() == (None if missing == "the switch" else switch)
    switch_at_init = {"nothing": False, "the switch": None, "the module": switch}
    assert calls == [switch_at_init[missing], "shut down"]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_ray_starts_reaches_the_runs_own_handler(
    signal_number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked_signals = []

    def init(**options: Any) -> None:
        # ray.init begins like this.
        _private.utils.set_sigterm_handler(lambda number, frame: pytest.fail("Ray's handler was called"))
        os.kill(os.getpid(), signal_number)
        program = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        blocked_signals.append(subprocess.check_output([sys.executable, "-c", program], text=True).split())

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with Interrupts(lambda: None) as interrupts:
        with ray_session(tmp_path):
            assert interrupts.is_requested
        assert blocked_signals == [[str(int(signal.SIGHUP))]]
