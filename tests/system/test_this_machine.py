"""A live run as the machine's other users and its neighbours see it, and as it ends when Ray does.

One run for all tests of this file: it is looked at, then stalled, then hurt.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.runs import Run, survivors

NOBODY = 65534
TEMPORARY = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")}
SETTINGS = ("grpo.num_steps=100000", "validation.every=0", "checkpoint.every=0", "run.explain_after_s=2")
# Runs in another namespace: which of the ports at an address take a connection.
KNOCK = """
import json, socket, sys
open_ports = []
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=60).close()
        open_ports.append(port)
    except OSError:
        pass
print(json.dumps(open_ports))
"""


@pytest.fixture(scope="module")
def run(ordinary_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    live = Run(tmp_path_factory.mktemp("live"), "live", *SETTINGS)
    try:
        live.wait_for_step(3)
        yield live
    finally:
        live.end_now()


def family(run: Run) -> list[psutil.Process]:
    driver = psutil.Process(run.process.pid)
    return [driver, *driver.children(recursive=True)]


def of_each(processes: list[psutil.Process], asked: Callable[[psutil.Process], list[Any]]) -> list[Any]:
    """Return the facts of all processes, without ones that end meanwhile."""
    found: list[Any] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += asked(process)
    return found


def folders(run: Run) -> list[Path]:
    """The run's own, in temporary folders and in shared memory."""
    owner = f"process {run.process.pid}"
    return [mark.parent for root in TEMPORARY for mark in root.glob("rlctl-*/.owner") if mark.read_text() == owner]


def as_nobody(work: Callable[[], Any]) -> Any:
    """The result of `work` in a process of another user."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def opens(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
        return True
    except OSError:
        return False


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
            return True
        except OSError:
            return False


def test_files_of_a_run_are_below_folders_that_only_its_user_enters(run: Run) -> None:
    own = folders(run)
    # Ray's, its token's, and that of weights in transit.
    assert len(own) == 3
    assert Path("/dev/shm") in {path.parent for path in own}
    assert {path.stat().st_mode & 0o777 for path in (*own, run.path)} == {0o700}
    # Ray opens its own folder to everybody, below.
    assert any(path.stat().st_mode & 0o002 for folder in own for path in folder.iterdir())


def test_another_user_can_read_write_and_connect_to_nothing_of_a_run(run: Run) -> None:
    own = [str(path) for path in folders(run)]
    # Unlike rglob, walk takes no offence at a folder that is removed meanwhile.
    walked = [Path(parent, name) for folder in own for parent, *names in os.walk(folder) for name in chain(*names)]
    inside = [str(path) for path in walked if not path.is_symlink()]
    used = {file.path for file in of_each(family(run), lambda process: process.open_files())}
    unix = of_each(family(run), lambda process: process.net_connections("unix"))
    sockets = {each.laddr for each in unix if each.laddr}
    assert {path for path in sockets if path.startswith(("\0", "@"))} == set()
    assert len(inside) > 30
    assert any(path.endswith("/raylet") for path in sockets)
    assert any(path.startswith("/dev/shm/") for path in used)

    temporary = tuple(map(str, TEMPORARY))

    def tried() -> dict[str, list[str]]:
        return {
            "listed": [path for path in own if opens(path, os.O_RDONLY | os.O_DIRECTORY)],
            "made": [path for path in [*own, *inside] if opens(f"{path}/planted", os.O_CREAT | os.O_WRONLY)],
            "read": [path for path in [*inside, *used] if path.startswith(temporary) and opens(path, 0)],
            "written": [path for path in [*inside, *used] if opens(path, os.O_WRONLY | os.O_NONBLOCK)],
            "connected": [path for path in sockets if connects(path)],
        }

    assert as_nobody(tried) == {"listed": [], "made": [], "read": [], "written": [], "connected": []}


def listening(run: Run) -> list[tuple[str, int]]:
    """(address, port) of every socket of the run that takes connections, or datagrams."""
    inet = of_each(family(run), lambda process: process.net_connections("inet"))
    sockets = [each for each in inet if each.laddr]
    wanted = [each for each in sockets if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM]
    return sorted({(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in wanted})


def test_a_run_listens_on_loopback_alone(run: Run) -> None:
    found = listening(run)
    # The driver, the head, the raylet with its store, trainer and engine; torch's store and gloo.
    assert len(found) >= 7
    assert [each for each in found if not each[0].startswith("127.") and each[0] != "::1"] == []


def test_ray_has_no_processes_that_a_run_has_no_use_for(run: Run) -> None:
    commands = of_each(family(run), lambda process: [" ".join(process.cmdline())])
    assert any("/gcs_server " in command for command in commands)
    unused = ("monitor.py", "dashboard.py", "dashboard/agent", "DashboardAgent", "RuntimeEnvAgent")
    assert [command for command in commands if any(name in command for name in unused)] == []


@pytest.fixture
def neighbour() -> Iterator[tuple[str, str]]:
    """(name, address of this machine in it) of a network namespace, as a second machine on a cable."""
    name, here = f"rl{os.getpid() % 10**6}", f"10.77.{os.getpid() % 250}.1"
    there = here[:-1] + "2"
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and the command ip")
    commands = (
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip address add {here}/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} address add {there}/30 dev {name}b",
        f"ip -n {name} link set {name}b up",
    )
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespace here: {command}: {done.stderr.strip()}")
        yield name, here
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_neighbour_reaches_no_port_of_a_run(run: Run, neighbour: tuple[str, str]) -> None:
    name, here = neighbour
    ports = sorted({port for _, port in listening(run)})
    with socket.create_server(("0.0.0.0", 0)) as control:
        reachable = control.getsockname()[1]
        command = ["ip", "netns", "exec", name, sys.executable, "-c", KNOCK, here, *map(str, [reachable, *ports])]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=800).stdout)
    # The cable is there, and nothing of the run at its end.
    assert found == [reachable]


@pytest.mark.parametrize("name", ["trainer-0", "engine-0"])
def test_a_stalled_worker_is_explained_in_a_synchronous_run(run: Run, name: str) -> None:
    pid = run.wait_for_event("processes")[name]

    def explained() -> list[str]:
        warnings = [event["what"] for event in run.events() if event["kind"] == "warning"]
        return [what for what in warnings if f" s for {name} (process {pid} is stopped: kill -CONT {pid})" in what]

    os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for(f"an explanation of {name}", lambda: bool(explained()))
    finally:
        os.kill(pid, signal.SIGCONT)
    (what, *_) = explained()
    assert "trainer at version " in what
    assert ", engines at version " in what
    # The call that it is stopped in depends on the machine's speed; a refit's call has its own limit.
    limit = "refit.timeout_s" if "call refit_" in what else "run.deadline_s"
    assert what.count(f" s ({limit})") == 1
    run.wait_for_step(len(run.steps()) + 2)


def test_an_engine_that_stalls_in_a_refit_is_explained(run: Run) -> None:
    pid = run.wait_for_event("processes")["engine-0"]

    def trains() -> bool:
        return [event["name"] for event in run.events() if event["kind"] == "phase"][-1] == "train"

    def explanations(of: str) -> list[str]:
        warnings = [event["what"] for event in run.events() if event["kind"] == "warning"]
        return [what for what in warnings if of in what]

    # The engine rests while the trainer works; the refit needs it next. An engine stopped too late, after the refit, is
    # stopped again.
    stopped, refit = f" s for engine-0 (process {pid} is stopped: kill -CONT {pid})", "call refit_receive"
    while not explanations(refit):
        told = len(explanations(stopped))
        run.wait_for("a step's training", trains)
        os.kill(pid, signal.SIGSTOP)
        try:
            run.wait_for("an explanation", lambda told=told: len(explanations(stopped)) > told)
        finally:
            os.kill(pid, signal.SIGCONT)
        run.wait_for_step(len(run.steps()) + 2)
    assert stopped in explanations(refit)[0]
    assert "(refit.timeout_s)" in explanations(refit)[0]
    run.wait_for_step(len(run.steps()) + 2)


def test_a_run_whose_ray_head_is_killed_saves_and_ends_with_its_reason(run: Run) -> None:
    everybody = family(run)
    (head,) = of_each(everybody, lambda process: [process] * (process.name() == "gcs_server"))
    head.kill()
    assert run.end() == 1
    end = run.events()[-1]
    assert (end["kind"], end["status"]) == ("run_ended", "failed")
    assert f"Ray's gcs_server (process {head.pid}) is gone" in end["reason"]
    resume = f"rlctl train grpo --resume {run.path}"
    assert end["next"][0] == resume
    assert resume in run.text()
    assert "live failed: Ray's gcs_server" in run.text()
    done = run.steps()[-1]["step"]
    assert (run.path / "checkpoints" / f"step_{done}").is_dir()
    assert survivors(everybody) == []
    assert folders(run) == []
