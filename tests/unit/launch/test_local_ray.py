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
    _needed_processes,
    _watch_processes,
    _with_idle_agent,
    _without_unused,
    local_ray,
    ray_session,
)
from rlctl.run.interrupts import Interrupts

import ray  # isort: skip (Ray reads rlctl's settings at its import)
from ray import _private  # isort: skip
from tests.waiting import until


def sleeper(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A child process of that name."""
    program = shutil.which("sleep")
    assert program
    if not (folder / name).exists():
        (folder / name).symlink_to(program)
    return subprocess.Popen([folder / name, "600"])


def test_the_ended_processes_of_a_first_attempt_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GIVE_UP_S", 0.1)
    if Path(shutil.which("sleep") or "").resolve().name != "sleep":
        pytest.skip("sleep is one of many programs in one file here")
    first = [sleeper(tmp_path, name) for name in _NEEDED_NAMES]
    for each in first:
        each.kill()
        until(lambda each=each: psutil.Process(each.pid).status() == psutil.STATUS_ZOMBIE)
    second, lost = [sleeper(tmp_path, name) for name in _NEEDED_NAMES], list[str]()
    try:
        with _watch_processes(_needed_processes(), lost.append):
            time.sleep(1.2)
            assert lost == []
            second[0].kill()
            until(lambda: lost)
            # On a cluster the run is given up once its node is gone too, and not before.
            with _watch_processes(_needed_processes(), lost.append, partial(lost.append, "given up")):
                time.sleep(1.2)
                second[1].kill()
                until(lambda: "given up" in lost)
        raylet_is_gone = f"Ray's raylet (process {second[1].pid}) is gone"
        assert lost == [f"Ray's gcs_server (process {second[0].pid}) is gone", raylet_is_gone, "given up"]
    finally:
        for each in (*first, *second):
            each.kill()
            each.wait()


def test_a_start_that_stays_too_slow_ends_with_the_key_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def init(**options: Any) -> None:
        started.append(Path(options["_temp_dir"]))
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    # 15 s from one look at the clock to the next.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=count(0, 15).__next__))
    with pytest.raises(RayTooSlow) as error, local_ray(tmp_path, deadline_s=45):
        pass
    assert str(error.value) == (
        "Ray did not start within its own 30 s, 2 times in 30 s: this machine is too busy or too slow for it; end "
        f"other programs, or raise run.deadline_s=45. Ray's log: {tmp_path}/ray.log"
    )
    assert not any(folder.exists() for folder in started)


@pytest.mark.parametrize("gone", ["a method", "the module"])
def test_a_ray_without_the_private_methods_starts_in_its_own_way(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.node import Node

    own = {name: getattr(Node, name) for name in _UNUSED}
    if gone == "the module":
        monkeypatch.setitem(sys.modules, "ray._private.node", None)
    else:
        monkeypatch.delattr(Node, _UNUSED[0])
    with _without_unused():
        kept = [name for name in own if getattr(Node, name, None) is own[name]]
        assert kept == (list(own) if gone == "the module" else [])
    monkeypatch.undo()
    assert {name: getattr(Node, name) for name in _UNUSED} == own


def test_a_raylet_gets_idle_agents_and_keeps_what_it_has_in_another_form() -> None:
    command = "python main.py --node-id=ab --session-dir=/s/t --runtime-env-dir=/r"
    made = _with_idle_agent(f"--runtime_env_agent_command={command}")
    assert made.startswith(f"--runtime_env_agent_command={sys.executable} ")
    assert made.endswith("/idle_agent.py /s/t ab runtime_env_agent_port")
    for option in ("--runtime_env_agent_command=python main.py", f"--python_worker_command={command}", "--head"):
        assert _with_idle_agent(option) == option


@pytest.mark.parametrize("gone", ["nothing", "the switch", "the module"])
def test_a_ray_without_its_private_switch_of_loopback_starts(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants

    own, seen = ray_constants.ENABLE_RAY_CLUSTER, []
    monkeypatch.setattr(ray, "init", lambda **options: seen.append(getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)))
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append("shut down"))
    if gone == "the module":
        monkeypatch.delattr("ray._private.ray_constants")
        monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    elif gone == "the switch":
        monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    with ray_session(tmp_path, loopback=True):
        assert getattr(ray_constants, "ENABLE_RAY_CLUSTER", None) == (None if gone == "the switch" else own)
    assert seen == [{"nothing": False, "the switch": None, "the module": own}[gone], "shut down"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_ray_starts_reaches_the_runs_own_handler(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = []

    def init(**options: Any) -> None:
        # As ray.init begins.
        _private.utils.set_sigterm_handler(lambda number, frame: pytest.fail("Ray's handler was called"))
        os.kill(os.getpid(), number)
        program = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        blocked.append(subprocess.check_output([sys.executable, "-c", program], text=True).split())

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with Interrupts(lambda: None) as interrupts:
        with ray_session(tmp_path):
            assert interrupts.is_requested
        assert blocked == [[str(int(signal.SIGHUP))]]
