"""Real failures while a cluster starts: each gives one line with the remedy, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.standin_ssh import StandInClusters
from tests.system.clusters import Clusters, gone

pytestmark = pytest.mark.usefixtures("ordinary_workers")


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[StandInClusters]:
    clusters = StandInClusters(tmp_path)
    yield clusters
    clusters.clean()


def over_ssh(host: str, *overrides: str) -> list[str]:
    return ["up", "ssh", f"hosts=[{host}]", f"python={sys.executable}", "port=0", "dashboard_port=0", *overrides]


def wait_until(is_true: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait until the condition holds, while the command runs."""
    while not is_true():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def read_errors(process: "subprocess.Popen[str]", code: int) -> str:
    """Return the error output of a command once it has ended with `code`."""
    _, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    return err


def kill_node(pid: int) -> None:
    """Kill a node's processes at once, as a machine without free memory does."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        process.kill()


def node_pid(clusters: Clusters, index: int) -> int:
    """Return the process id of a node, 0 until it is started."""
    if not (clusters.folder() / "state.json").exists():
        return 0
    nodes = clusters.state()["nodes"]
    return int(nodes[index]["pid"])


def test_the_disk_fills_between_check_and_start(clusters: StandInClusters, small_disk: Path) -> None:
    clusters.environment["SMALL"] = str(small_disk)
    # Enough for the check and the first files.
    small_disk.joinpath("filled").write_bytes(bytes(900_000))
    _, err = clusters.run(*over_ssh("full", "min_disk_gib=0"), code=1)
    assert f"failed  full: did not start: disk full: nothing left for Ray's files in {small_disk}\n" in err
    assert err.splitlines()[-1].startswith("error: the head did not start, nothing is left running")
    assert clusters.leftovers() == []
    assert [path.name for path in small_disk.iterdir()] == ["filled"]


def test_a_head_that_is_too_slow(clusters: StandInClusters) -> None:
    _, err = clusters.run("up", "num_cpus=1", "start_timeout_s=0.1", code=1)
    assert "failed  head: did not start: not up within 0.1 s (start_timeout_s)\n" in err
    assert "error: the head did not start, nothing is left running; all it wrote: rlctl cluster logs local\n" in err
    assert clusters.leftovers() == []


def test_a_connection_that_breaks_while_a_node_starts(clusters: StandInClusters) -> None:
    _, err = clusters.run(*over_ssh("breaks"), code=1)
    assert "failed  breaks: did not start: the connection broke off: it no longer answers\n" in err
    # The node had started, although its answer was lost. It is found because its folder's name was chosen before.
    assert "ok      breaks: stopped; logs in " in err
    assert clusters.leftovers() == []


def test_another_command_meanwhile_and_a_terminal_that_closes(clusters: StandInClusters) -> None:
    process = clusters.popen(*over_ssh("waits"))
    wait_until((clusters.parts / "waiting").exists, process)
    for command in (over_ssh("waits"), ["down"]):
        _, err = clusters.run(*command, code=1)
        assert err == "error: another rlctl is starting or stopping ssh: wait for it to end, or interrupt it\n"
    os.killpg(process.pid, signal.SIGHUP)
    (clusters.parts / "go").touch()
    assert "ok      waits: stopped; logs in " in read_errors(process, 130)
    assert clusters.leftovers() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_while_it_starts(clusters: StandInClusters, number: int) -> None:
    process = clusters.popen("up")
    # From here on the start of the head takes seconds.
    wait_until(lambda: node_pid(clusters, 0), process)
    os.killpg(process.pid, number)
    read_errors(process, 130)
    assert clusters.leftovers() == []
    assert "no cluster is up" in clusters.run("status", code=2)[1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_head_and_a_state_that_is_stale(clusters: StandInClusters) -> None:
    clusters.run("up", "num_cpus=1")
    first = clusters.state()["nodes"][0]
    kill_node(first["pid"])
    out, _ = clusters.run("status", code=1)
    assert "local gone" in out
    assert "rlctl cluster down local" in " ".join(out.split())
    assert clusters.run("list")[0].splitlines()[1].split()[2] == "gone"
    # Up again clears the leftovers of the first, and a killed `up` is cleared as well.
    out, err = clusters.run("up", "num_cpus=1")
    assert "local was up before and its processes are gone or half started: clearing up" in err
    assert "local is up: 1 node" in out
    second = clusters.state()["nodes"][0]
    assert gone([first["folder"]])
    assert first["pid"] != second["pid"]
    clusters.run("down")
    assert clusters.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_dies_while_another_starts(clusters: StandInClusters, killed: int) -> None:
    process = clusters.popen("up", "nodes=2", "num_cpus=1")
    wait_until(lambda: node_pid(clusters, 0) and node_pid(clusters, 1), process)
    kill_node(node_pid(clusters, killed))
    err = read_errors(process, 1)
    assert "failed  node-1: did not start: " in err
    assert "node-1 did not start, nothing is left running; all it wrote: rlctl cluster logs local\n" in err
    # Ray's own wait for a head that is gone would take all of start_timeout_s.
    assert ("the head does not answer at port " in err) == (killed == 0)
    assert clusters.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lost_node_is_started_again_and_the_others_are_left_alone(clusters: StandInClusters) -> None:
    clusters.run("up", "nodes=2", "num_cpus=1")
    before = clusters.state()["nodes"]
    kill_node(before[1]["pid"])
    assert "local partly up" in clusters.run("status", code=1)[0]

    # Ctrl-C on the way keeps the existing parts.
    process = clusters.popen("up")
    wait_until(lambda: node_pid(clusters, 1) not in (0, before[1]["pid"]), process)
    os.killpg(process.pid, signal.SIGINT)
    read_errors(process, 130)
    stopped = clusters.state()["nodes"]
    assert stopped[0] == before[0]
    assert not Path(stopped[1]["folder"]).exists()
    assert "local partly up" in clusters.run("status", code=1)[0]

    out, err = clusters.run("up", "num_cpus=7")
    assert "warning node-1 gone: starting again, the other nodes are left as they are\n" in err
    assert "ok      node-1: up in " in err
    assert "overrides change nothing" in err
    assert "local has node-1 again: 2 nodes, 2 CPUs, 0 GPUs, at 127.0.0.1:" in out
    after = clusters.state()["nodes"]
    assert after[0] == before[0]
    assert psutil.pid_exists(before[0]["pid"])
    assert gone([before[1]["folder"], stopped[1]["folder"]])
    clusters.run("down")
    assert clusters.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_little_shared_memory_is_a_warning_and_the_store_fits_into_it(clusters: StandInClusters) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    small = 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
    clusters.prefix = ("unshare", "-m", "sh", "-c", small, "sh")
    _, err = clusters.run("up", "num_cpus=1", "object_store_mib=1000")
    assert "warning head: /dev/shm has 0.2 GiB; in a container: --shm-size=2g or more\n" in err
    assert "WARNING" not in clusters.run("logs", "--node", "head", "--lines", "50")[0]
    clusters.run("down")
    assert clusters.leftovers() == []
