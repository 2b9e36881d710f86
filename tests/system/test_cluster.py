"""A cluster on this machine, as a person uses it: up, looked at, used with its token and not without, down."""

import json
import subprocess
import time
from itertools import chain
from pathlib import Path

import pytest

from tests.system.clusters import Clusters, gone

pytestmark = pytest.mark.usefixtures("ordinary_workers")

PROGRAM = """
import ray
ray.init(log_to_driver=False)
print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


def prefix_with_clock(folder: Path, by_s: int) -> tuple[str, ...]:
    """Return a prefix for a command: it sees the boot time that the kernel gives after its clock was set."""
    text = Path("/proc/stat").read_text()
    then = int(text.partition("btime ")[2].split()[0])
    (folder / "stat").write_text(text.replace(f"btime {then}", f"btime {then + by_s}"))
    mounted = f'mount --bind {folder / "stat"} /proc/stat && exec "$0" "$@"'
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", mounted)
    trial = subprocess.run([*prefix, "true"], check=False, stderr=subprocess.DEVNULL)
    # Where no user namespace may be made, nothing is set.
    return prefix if trial.returncode == 0 else ()


@pytest.mark.timeout(600)
def test_up_used_and_down(clusters: Clusters, tmp_path: Path) -> None:
    out, err = clusters.run("up", "num_cpus=2")
    assert "local is up: 1 node, 2 CPUs, 0 GPUs, at 127.0.0.1:" in out
    assert "rlctl cluster down local" in out
    assert "ok      head: up in " in err
    state = clusters.state()
    folders = [node["folder"] for node in state["nodes"]]
    token = (clusters.folder() / "token").read_text()
    assert token not in out + err + json.dumps(state)

    # Ray's own driver asks twenty times, for 21 s, before it says no: here twice, while everything else goes on.
    stranger = tmp_path / "stranger"
    stranger.write_text("0" * 64)
    refused = clusters.drive(PROGRAM, RAY_AUTH_TOKEN_PATH=str(stranger), RAY_NUM_REDIS_GET_RETRIES="2")
    friend = clusters.drive(PROGRAM)
    # In a machine whose clock was set by three seconds since: the cluster is healthy all the same.
    clusters.prefix = prefix_with_clock(tmp_path, 3)
    assert "local is up already: 1 node" in clusters.run("up")[0]
    clusters.prefix = ()
    assert clusters.state() == state
    status = json.loads(clusters.run("status", "--json")[0])
    assert status["condition"] == "up"
    (node,) = status["nodes"]
    assert (node["condition"], node["resources"]["CPU"]) == ("up", 2)
    assert {address for address, _, _ in node["listening"]} == {"127.0.0.1"}
    assert token not in json.dumps(status)
    began = time.monotonic()
    text = clusters.run("status")[0]
    answered_s = time.monotonic() - began
    assert "everything listens on loopback alone" in text
    assert max(map(len, text.splitlines())) <= 80
    listed = clusters.run("list")[0].splitlines()
    assert listed[1].split()[:4] == ["local", "local", "up", "1"]
    assert "head start.log | " in clusters.run("logs", "--node", "head")[0]

    out, err = friend.communicate(timeout=500)
    assert out == "42\n", err
    out, err = refused.communicate(timeout=500)
    assert "Failed to connect to Ray cluster" in err

    # Another person's cluster cannot have a port of this one.
    (tmp_path / "other").mkdir()
    other = Clusters(tmp_path / "other")
    port = state["address"].rpartition(":")[2]
    assert f"port {port} is taken: stop what listens there" in other.run("up", f"port={port}", code=1)[1]

    path = clusters.folder() / "token"
    path.chmod(0o644)
    message = f"error: token {path} is open to other users: chmod 600 it, or restart it: rlctl cluster down local"
    assert clusters.run("env", code=1)[1].startswith(message)
    path.rename(tmp_path / "hidden")
    assert f"error: token {path} cannot be read: No such file" in clusters.run("env", code=1)[1]
    (tmp_path / "hidden").rename(path)
    path.chmod(0o600)
    path.write_text("0" * 64)
    began = time.monotonic()
    assert clusters.run("status", code=1)[1].startswith("error: wrong token: ")
    # Ray's own driver would ask for 21 s more than it takes to be answered.
    assert time.monotonic() - began < 2 * answered_s + 15
    assert "local is down" in clusters.run("down")[0]
    assert gone(folders)
    assert [path.name for path in clusters.folder().iterdir()] == ["logs"]
    assert "no cluster is up" in clusters.run("down", code=2)[1]
    assert "head start.log | " in clusters.run("logs")[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_several_nodes_on_this_machine(clusters: Clusters) -> None:
    clusters.run("up", "local", "nodes=3", "num_cpus=1", "name=three")
    status = json.loads(clusters.run("status", "--json")[0])
    assert [node["condition"] for node in status["nodes"]] == ["up"] * 3
    listeners = chain.from_iterable(node["listening"] for node in status["nodes"])
    assert {address for address, _, _ in listeners} == {"127.0.0.1"}
    folders = [node["folder"] for node in clusters.state("three")["nodes"]]
    clusters.run("down", "three")
    assert gone(folders)
