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
# A program for another namespace: it prints the ports of an address that take a connection.
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


def processes_of(run: Run) -> list[psutil.Process]:
    driver = psutil.Process(run.process.pid)
    return [driver, *driver.children(recursive=True)]


def collect_facts(run: Run, ask: Callable[[psutil.Process], list[Any]]) -> list[Any]:
    """Return the facts of all processes of a run, without processes that end meanwhile."""
    facts: list[Any] = []
    for process in processes_of(run):
        with suppress(psutil.NoSuchProcess):
            facts += ask(process)
    return facts


def private_folders(run: Run) -> list[Path]:
    """Return the folders that the run made in temporary folders and in shared memory."""
    owner = f"process {run.process.pid}"
    marks = chain.from_iterable(root.glob("rlctl-*/.owner") for root in TEMPORARY)
    return [mark.parent for mark in marks if mark.read_text() == owner]


def run_as_nobody(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a process of another user."""
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


def can_open(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
        return True
    except OSError:
        return False


def can_connect(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
            return True
        except OSError:
            return False


def test_files_of_a_run_are_below_folders_that_only_its_user_enters(run: Run) -> None:
    folders = private_folders(run)
    # Ray's, its token's, that of weights in transit, and that of the server that forks workers.
    assert len(folders) == 4
    assert Path("/dev/shm") in {folder.parent for folder in folders}
    assert {folder.stat().st_mode & 0o777 for folder in (*folders, run.path)} == {0o700}
    # Below, Ray opens its own folder to everybody.
    paths = chain.from_iterable(folder.iterdir() for folder in folders)
    assert any(path.stat().st_mode & 0o002 for path in paths)


def test_another_user_can_read_write_and_connect_to_nothing_of_a_run(run: Run) -> None:
    folders = [str(folder) for folder in private_folders(run)]
    # Unlike rglob, walk takes no offence at a folder that is removed meanwhile.
    inside = []
    for parent, subfolders, files in chain.from_iterable(map(os.walk, folders)):
        paths = [Path(parent, name) for name in subfolders + files]
        inside += [str(path) for path in paths if not path.is_symlink()]
    open_files = {file.path for file in collect_facts(run, lambda process: process.open_files())}
    connections = collect_facts(run, lambda process: process.net_connections("unix"))
    sockets = {connection.laddr for connection in connections if connection.laddr}
    assert {path for path in sockets if path.startswith(("\0", "@"))} == set()
    assert len(inside) > 30
    assert any(path.endswith("/raylet") for path in sockets)
    assert any(path.startswith("/dev/shm/") for path in open_files)
    paths_to_plant_in = folders + inside
    paths_to_write = [*inside, *open_files]
    paths_to_read = [path for path in paths_to_write if path.startswith(tuple(map(str, TEMPORARY)))]

    def attempt_all() -> dict[str, list[str]]:
        return {
            "listed": [path for path in folders if can_open(path, os.O_RDONLY | os.O_DIRECTORY)],
            "made": [path for path in paths_to_plant_in if can_open(f"{path}/planted", os.O_CREAT | os.O_WRONLY)],
            "read": [path for path in paths_to_read if can_open(path, os.O_RDONLY)],
            "written": [path for path in paths_to_write if can_open(path, os.O_WRONLY | os.O_NONBLOCK)],
            "connected": [path for path in sockets if can_connect(path)],
        }

    assert run_as_nobody(attempt_all) == {"listed": [], "made": [], "read": [], "written": [], "connected": []}


def listening_addresses(run: Run) -> list[tuple[str, int]]:
    """Return (address, port) of every socket of the run that takes connections, or datagrams."""
    addresses = set()
    for connection in collect_facts(run, lambda process: process.net_connections("inet")):
        is_open = connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
        if connection.laddr and is_open:
            addresses.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return sorted(addresses)


def test_a_run_listens_on_loopback_alone(run: Run) -> None:
    addresses = listening_addresses(run)
    # The driver, the head, the raylet with its store, trainer and engine; torch's store and gloo.
    assert len(addresses) >= 7
    assert [ip for ip, _ in addresses if not ip.startswith("127.") and ip != "::1"] == []


def test_ray_has_no_processes_that_a_run_has_no_use_for(run: Run) -> None:
    commands = collect_facts(run, lambda process: [" ".join(process.cmdline())])
    assert any("/gcs_server " in command for command in commands)
    unused = ("monitor.py", "dashboard.py", "dashboard/agent", "DashboardAgent", "RuntimeEnvAgent")
    assert [command for command in commands if any(name in command for name in unused)] == []


@pytest.fixture
def neighbour() -> Iterator[tuple[str, str]]:
    """Make a network namespace, as a second machine on a cable. Yield its name and this machine's address in it."""
    name = f"rl{os.getpid() % 10**6}"
    network = f"10.77.{os.getpid() % 250}"
    own_address = f"{network}.1"
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and the command ip")
    commands = (
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip address add {own_address}/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} address add {network}.2/30 dev {name}b",
        f"ip -n {name} link set {name}b up",
    )
    try:
        for command in commands:
            outcome = subprocess.run(command.split(), capture_output=True, text=True)
            if outcome.returncode:
                pytest.skip(f"no network namespace here: {command}: {outcome.stderr.strip()}")
        yield name, own_address
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_neighbour_reaches_no_port_of_a_run(run: Run, neighbour: tuple[str, str]) -> None:
    name, own_address = neighbour
    ports = sorted({port for _, port in listening_addresses(run)})
    with socket.create_server(("0.0.0.0", 0)) as control_server:
        control_port = control_server.getsockname()[1]
        command = ["ip", "netns", "exec", name, sys.executable, "-c", KNOCK, own_address]
        command += map(str, [control_port, *ports])
        outcome = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    # The cable works, and nothing of the run is at its end.
    assert json.loads(outcome.stdout) == [control_port]


@pytest.mark.parametrize("name", ["trainer-0", "engine-0"])
def test_a_stalled_worker_is_explained_in_a_synchronous_run(run: Run, name: str) -> None:
    pid = run.wait_for_event("processes")[name]

    stop = f" s for {name} (process {pid} is stopped: kill -CONT {pid})"
    os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for(f"an explanation of {name}", lambda: bool(warnings_with(run, stop)))
    finally:
        os.kill(pid, signal.SIGCONT)
    explanation = warnings_with(run, stop)[0]
    assert "trainer at version " in explanation
    assert ", engines at version " in explanation
    # The call in which the worker is stopped depends on the machine's speed; a refit's call has its own limit.
    limit = "refit.timeout_s" if "call refit_" in explanation else "run.deadline_s"
    assert explanation.count(f" s ({limit})") == 1
    run.wait_for_step(len(run.steps()) + 2)


def warnings_with(run: Run, words: str) -> list[str]:
    """Return the run's warnings that have these words."""
    warnings = [event["what"] for event in run.events() if event["kind"] == "warning"]
    return [warning for warning in warnings if words in warning]


def test_an_engine_that_stalls_in_a_refit_is_explained(run: Run) -> None:
    pid = run.wait_for_event("processes")["engine-0"]

    def is_training() -> bool:
        return [event["name"] for event in run.events() if event["kind"] == "phase"][-1] == "train"

    # The engine rests while the trainer works; the refit needs it next. An engine stopped too late, after the refit, is
    # stopped again.
    stop = f" s for engine-0 (process {pid} is stopped: kill -CONT {pid})"
    while not warnings_with(run, "call refit_receive"):
        num_before = len(warnings_with(run, stop))
        run.wait_for("a step's training", is_training)
        os.kill(pid, signal.SIGSTOP)
        try:
            run.wait_for("an explanation", lambda before=num_before: len(warnings_with(run, stop)) > before)
        finally:
            os.kill(pid, signal.SIGCONT)
        run.wait_for_step(len(run.steps()) + 2)
    explanation = warnings_with(run, "call refit_receive")[0]
    assert stop in explanation
    assert "(refit.timeout_s)" in explanation
    run.wait_for_step(len(run.steps()) + 2)


def test_a_run_whose_ray_head_is_killed_saves_and_ends_with_its_reason(run: Run) -> None:
    processes = processes_of(run)
    (head,) = collect_facts(run, lambda process: [process] if process.name() == "gcs_server" else [])
    head.kill()
    assert run.end() == 1
    end = run.events()[-1]
    assert (end["kind"], end["status"]) == ("run_ended", "failed")
    assert f"Ray's gcs_server (process {head.pid}) is gone" in end["reason"]
    resume_command = f"rlctl train grpo --resume {run.path}"
    assert end["next"][0] == resume_command
    assert resume_command in run.text()
    assert "live failed: Ray's gcs_server" in run.text()
    last_step = run.steps()[-1]["step"]
    assert (run.path / "checkpoints" / f"step_{last_step}").is_dir()
    assert survivors(processes) == []
    assert private_folders(run) == []
