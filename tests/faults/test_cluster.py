"""What goes wrong with a cluster, done for real: one line that says what to do, and nothing left behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.clusters import Clusters, gone

# Stands in for ssh where no sshd is: the host's name says what is wrong with it. Everything behind it is real.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
export SSH_CONNECTION="127.0.0.1 1 10.9.9.9 22"
case $host in
  fast) export PYTHONPATH=$SHIFT:$PYTHONPATH ;;
  full) export TMPDIR=$SMALL ;;
  nokey) echo "me@nokey: Permission denied (publickey)." >&2; exit 255 ;;
  down) echo "ssh: connect to host down port 22: Connection timed out" >&2; exit 255 ;;
  old) exec python2 "$@" ;;
esac
exec sh -c "$*"
"""


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path)
    yield clusters
    clusters.clean()


@pytest.fixture
def fake_ssh(tmp_path: Path) -> Clusters:
    """Clusters whose ssh is `SSH`."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    shift = tmp_path / "shift"
    shift.mkdir()
    (shift / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 100\n")
    path = f"{program.parent}:{os.environ['PATH']}"
    return Clusters(tmp_path, PATH=path, SHIFT=str(shift), SMALL=str(tmp_path / "small"))


def refused(clusters: Clusters, hosts: str, *overrides: str) -> str:
    """What `up` says of hosts that will not do; nothing of it is left."""
    _, err = clusters.run("up", "ssh", f"hosts=[{hosts}]", f"python={sys.executable}", *overrides, code=1)
    assert not clusters.folder("ssh").exists()
    return err


def test_a_host_that_does_not_exist(clusters: Clusters) -> None:
    if not Path("/usr/bin/ssh").exists():
        pytest.skip("no ssh here")
    err = refused(clusters, "nohost.invalid")
    assert "failed  nohost.invalid: no such host: check the name, or add it to ~/.ssh/config\n" in err
    assert "error: 0 of 1 hosts will do: nothing was started\n" in err


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nokey", "key not accepted: try `ssh nokey` by hand, add your key with ssh-copy-id or ssh-add"),
        ("down", "not reachable within the time for connecting"),
        ("fast", "s fast: start its time service (NTP)"),
    ],
)
def test_each_fault_of_a_host_is_a_line(fake_ssh: Clusters, host: str, said: str) -> None:
    err = refused(fake_ssh, host)
    assert sum(line.startswith("failed") for line in err.splitlines()) == 1
    assert f"failed  {host}: " in err
    assert said in err


def test_a_python_without_ray_and_one_that_is_not_there(fake_ssh: Clusters) -> None:
    _, err = fake_ssh.run("up", "ssh", "hosts=[a]", "python=/no/python", code=1)
    assert "a: no Python there: /no/python not found; set python=... to one that has ray and rlctl" in err
    bare = fake_ssh.home / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    _, err = fake_ssh.run("up", "ssh", "hosts=[a]", f"python={bare}/bin/python", code=1)
    assert "a: ray and psutil not installed in its Python: pip install rlctl there" in err


def test_a_full_disk(fake_ssh: Clusters) -> None:
    small = Path("/tmp") / f"rlctl-small-{os.getpid()}"
    small.mkdir()
    fake_ssh.environment["SMALL"] = str(small)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip(f"mounting a small file system is not permitted: {mounted.stderr.decode().strip()}")
        assert f"full: disk full: 0.0 GiB free in {small}, 5 wanted (min_disk_gib)" in refused(fake_ssh, "full")
    finally:
        subprocess.run(["umount", "-l", str(small)], capture_output=True)
        small.rmdir()


def test_a_port_that_is_taken(clusters: Clusters, fake_ssh: Clusters) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        _, err = clusters.run("up", "local", f"port={port}", code=1)
        assert f"failed  this machine: port {port} is taken: stop what listens there, or set another\n" in err
        assert f"a: port {port} is taken" in refused(fake_ssh, "a", f"port={port}")


def test_half_the_hosts_are_too_few_unless_min_hosts_says_so(fake_ssh: Clusters) -> None:
    err = refused(fake_ssh, "down, nokey, fast")
    assert "error: 0 of 3 hosts will do: nothing was started" in err
    err = refused(fake_ssh, "down, nokey, a", "min_hosts=2")
    assert "ok      a: Python" in err
    assert "error: 1 of 3 hosts will do, 2 wanted (min_hosts): nothing was started" in err


@pytest.mark.slow
def test_ctrl_c_while_it_starts(clusters: Clusters) -> None:
    process = clusters.popen("up")
    state = clusters.folder() / "state.json"
    # The head's process is there, and takes seconds from here on.
    while not (state.exists() and clusters.state()["nodes"][0]["pid"]):
        assert process.poll() is None
        time.sleep(0.02)
    folders = [node["folder"] for node in clusters.state()["nodes"]]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130, err
    assert gone(folders)
    assert not state.exists()
    assert "no cluster is up" in clusters.run("status", code=2)[1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_head_and_a_state_that_is_stale(clusters: Clusters) -> None:
    clusters.run("up", "num_cpus=1")
    first = clusters.state()["nodes"][0]
    for process in [psutil.Process(first["pid"]), *psutil.Process(first["pid"]).children(recursive=True)]:
        process.kill()
    out, _ = clusters.run("status", code=1)
    assert "local gone" in out
    assert "rlctl cluster down local" in " ".join(out.split())
    assert clusters.run("list")[0].splitlines()[1].split()[2] == "gone"
    # Up again clears what the first left, and a killed `up` is cleared as well.
    out, err = clusters.run("up", "num_cpus=1")
    assert "local stood before and its processes are gone or half started: clearing up" in err
    assert "local is up: 1 node" in out
    second = clusters.state()["nodes"][0]
    assert gone([first["folder"]])
    assert first["pid"] != second["pid"]
    clusters.run("down")
    assert gone([second["folder"]])
