"""Unsuitable hosts are found before a start, each with one line that has the remedy."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.standin_ssh import StandInClusters
from tests.system.clusters import Clusters

# Host -> verdict of one `rlctl cluster up`. Only the host `good` is suitable.
VERDICTS = {
    "nokey": "key not accepted: try `ssh nokey` by hand, add your key with ssh-copy-id or ssh-add",
    "down": "not reachable within the time for connecting",
    "fast": "s fast: start its time service (NTP)",
    "older": "wrong Python 3.9.2: rlctl needs 3.11 or newer; set python=...",
    "newer": f"wrong Python 3.99.2: the head good has 3.{sys.version_info[1]}, and Ray wants one for all",
    "oldray": "wrong Ray 2.48.0: pip install 'ray>=2.60,<2.61' there",
    "nopsutil": "psutil not installed in its Python: pip install rlctl there, or set python=...",
    "readonly": "no folder for Ray's files: neither TMPDIR nor /tmp can be written to there",
}


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[StandInClusters]:
    clusters = StandInClusters(tmp_path)
    yield clusters
    clusters.clean()


@pytest.fixture(scope="module")
def output_of_all(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines of one `up` about all of these hosts."""
    clusters = StandInClusters(tmp_path_factory.mktemp("hosts"))
    try:
        return try_up(clusters, ", ".join(["good", *VERDICTS])).splitlines()
    finally:
        clusters.clean()


def try_up(clusters: StandInClusters, hosts: str, *overrides: str) -> str:
    """Return the error output of `up` about unsuitable hosts; check that nothing is left behind."""
    _, err = clusters.run("up", "ssh", f"hosts=[{hosts}]", f"python={sys.executable}", *overrides, code=1)
    assert clusters.leftovers() == []
    assert not clusters.folder("ssh").exists()
    return err


@pytest.mark.parametrize("host", VERDICTS)
def test_each_fault_of_a_host_is_a_line(output_of_all: list[str], host: str) -> None:
    if host == "readonly" and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    lines = [line for line in output_of_all if line.startswith(f"failed  {host}: ")]
    assert len(lines) == 1
    assert lines[0].endswith(VERDICTS[host])


def test_one_host_of_many_is_too_few(output_of_all: list[str]) -> None:
    assert any(line.startswith("ok      good: Python") for line in output_of_all)
    assert output_of_all[-1] == f"error: 1 of {len(VERDICTS) + 1} hosts will do: nothing was started"


def test_as_many_as_min_hosts_says_are_enough(clusters: StandInClusters) -> None:
    assert try_up(clusters, "down, nokey, a", "min_hosts=2").endswith(
        "error: 1 of 3 hosts will do, 2 wanted (min_hosts): nothing was started\n"
    )


def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    if not Path("/usr/bin/ssh").exists():
        pytest.skip("no ssh here")
    clusters = Clusters(tmp_path)
    _, err = clusters.run("up", "ssh", "hosts=[nohost.invalid]", code=1)
    assert "failed  nohost.invalid: no such host: check the name, or add it to ~/.ssh/config\n" in err
    assert err.endswith("error: 0 of 1 hosts will do: nothing was started\n")
    assert not clusters.folder("ssh").exists()


def test_no_ssh_on_this_machine(clusters: StandInClusters) -> None:
    clusters.environment["PATH"] = str(clusters.parts)
    assert "failed  a: ssh is not installed on this machine\n" in try_up(clusters, "a")


def test_a_python_without_ray_and_one_that_is_not_there(clusters: StandInClusters) -> None:
    _, err = clusters.run("up", "ssh", "hosts=[a]", "python=/no/python", code=1)
    assert "a: no Python there: /no/python not found; set python=... to one that has ray and rlctl" in err
    bare = clusters.home / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    _, err = clusters.run("up", "ssh", "hosts=[a]", f"python={bare}/bin/python", code=1)
    assert "a: ray and psutil and rlctl not installed in its Python: pip install rlctl there" in err


def test_a_full_disk(clusters: StandInClusters, small_disk: Path) -> None:
    clusters.environment["SMALL"] = str(small_disk)
    verdict = f"full: disk full: 0.0 GiB free in {small_disk}, 5 wanted (min_disk_gib)"
    assert verdict in try_up(clusters, "full")


def test_a_port_that_is_taken(clusters: StandInClusters) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for key in ("port", "dashboard_port"):
            _, err = clusters.run("up", "local", f"{key}={port}", code=1)
            assert f"failed  this machine: port {port} is taken: stop what listens there, or set another\n" in err
        assert f"a: port {port} is taken" in try_up(clusters, "a", f"port={port}")


def test_a_file_with_mistakes_starts_nothing(clusters: StandInClusters) -> None:
    file = clusters.home / "lab.yaml"
    file.write_text("defaults: cluster/local.yaml\nnode: 2\nlisten_on_all: maybe\n")
    _, err = clusters.run("up", str(file), code=2)
    assert "lab.yaml:2: node: unknown key; did you mean nodes?" in err
    assert "lab.yaml:3: listen_on_all: must be" in err
    assert clusters.leftovers() == []


def test_a_state_that_is_damaged_or_has_no_place(clusters: StandInClusters) -> None:
    clusters.folder().mkdir(parents=True)
    state = clusters.folder() / "state.json"
    state.write_text('{"version": 1, "nodes": [')
    for command in ("up", "status", "down"):
        _, err = clusters.run(command, code=1)
        assert err == f"error: {state} is damaged: end its Ray processes by hand, then remove it\n"
    assert clusters.run("list")[0].splitlines()[1].split() == ["local", "damaged"]
    assert state.exists()
    state.unlink()
    clusters.environment["XDG_STATE_HOME"] = "/proc/none"
    _, err = clusters.run("up", code=1)
    assert "/proc/none/rlctl/clusters/local cannot be made: No such file or directory; set XDG_STATE_HOME to a" in err
