"""A cluster over ssh, on hosts with separate addresses: up, used, a host lost, too few hosts, down."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.clusters import Clusters, gone, processes_of
from tests.system.ssh_hosts import SshHosts, standing_hosts

PROGRAM = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=1)
def where():
    time.sleep(5)
    return ray.util.get_node_ip_address()

print(sorted(ray.get([where.remote() for _ in range(3)])))
"""
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with standing_hosts(tmp_path, 3) as hosts:
        yield hosts


@pytest.fixture
def clusters(hosts: SshHosts, tmp_path: Path) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path)
    yield clusters
    clusters.clean()


def file_of(hosts: SshHosts, folder: Path, *settings: str) -> str:
    """Write a user's own cluster file. Return its path."""
    file = folder / "lab.yaml"
    lines = ["defaults: cluster/ssh.yaml", f"hosts: [{', '.join(hosts.names)}]", f"python: {sys.executable}"]
    lines += [f"ssh_options: [-F, {hosts.config}]", "object_store_mib: 100", "num_cpus: 1", "connect_timeout_s: 3"]
    file.write_text("\n".join([*lines, *settings]) + "\n")
    return str(file)


def test_hosts_come_up_work_together_and_go(clusters: Clusters, hosts: SshHosts, tmp_path: Path) -> None:
    out, err = clusters.run("up", file_of(hosts, tmp_path, "other_ports: [7000, 7100]"), within_s=500)
    assert f"lab is up: 3 nodes, 3 CPUs, 0 GPUs, at {hosts.addresses[0]}:6379" in out
    assert [f"ok      {name}: Python" in err for name in hosts.names] == [True] * 3
    state = clusters.state("lab")
    folders = [node["folder"] for node in state["nodes"]]
    token = (clusters.folder("lab") / "token").read_text()
    assert token not in out + err + json.dumps(state)
    assert all((Path(folder) / "token").stat().st_mode & 0o077 == 0 for folder in folders)

    seen = json.loads(clusters.run("status", "--json")[0])
    assert [(node["condition"], node["address"]) for node in seen["nodes"]] == [
        ("up", address) for address in hosts.addresses
    ]
    # Ray opens to other machines the ports of the firewall's list, and no others.
    reachable = []
    for node in seen["nodes"]:
        reachable += [port for address, port, _ in node["listening"] if not address.startswith("127.")]
    assert reachable
    assert [port for port in reachable if port != 6379 and not 7000 <= port <= 7100] == []
    status = clusters.run("status")[0]
    assert "other machines can reach, with the token:" in status
    assert max(map(len, status.splitlines())) <= 80

    environment = {**clusters.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folders[0]}/token"}
    command = [*hosts.inside(0), sys.executable, "-c", PROGRAM, state["address"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == str(sorted(hosts.addresses)), done.stderr

    assert "host2 start.log | " in clusters.run("logs", "--node", "host2")[0]
    hosts.plug(2, "down")
    out, _ = clusters.run("status", code=1)
    assert "partly up" in out
    assert "host2: not reachable" in " ".join(out.split())
    _, err = clusters.run("down", code=1)
    assert "error: Ray may still run on host2" in err
    assert gone(folders[:2])
    hosts.plug(2, "up")
    hosts.wait()
    assert "lab is down" in clusters.run("down")[0]
    assert gone(folders)
    assert list(clusters.folder("lab").glob("*")) in ([], [clusters.folder("lab") / "logs"])


def test_too_few_hosts_stop_it_and_enough_go_on(clusters: Clusters, hosts: SshHosts, tmp_path: Path) -> None:
    hosts.plug(0, "down")
    _, err = clusters.run("up", file_of(hosts, tmp_path), code=1)
    assert "failed  host0: not reachable" in err
    assert "error: 2 of 3 hosts will do: nothing was started" in err
    assert not clusters.folder("lab").exists()

    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    text = hosts.config.read_text()
    hosts.config.write_text(text.replace(f"{tmp_path}/key\n", f"{stranger}\n"))
    _, err = clusters.run("up", file_of(hosts, tmp_path), code=1)
    assert "failed  host1: key not accepted: try `ssh host1` by hand" in err
    hosts.config.write_text(text)

    out, err = clusters.run("up", file_of(hosts, tmp_path, "min_hosts: 1"), within_s=500)
    assert "warning going on with 2 of 3 hosts (min_hosts)" in err
    assert f"lab is up: 2 nodes, 2 CPUs, 0 GPUs, at {hosts.addresses[1]}:6379" in out
    folders = [node["folder"] for node in clusters.state("lab")["nodes"]]
    assert processes_of(folders)
    clusters.run("down", "lab")
    assert gone(folders)
