"""A cluster as another host sees it: every listener is listed, and none answers without the token."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.clusters import Clusters
from tests.system.ssh_hosts import SshHosts, standing_hosts

STRANGER = Path(__file__).parent / "stranger.py"
# A worker that stays, so that its ports can be found.
ACTOR = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, namespace="stays")

@ray.remote(num_cpus=0)
class Stays:
    def here(self):
        return "here"

print(ray.get(Stays.options(name="stays", lifetime="detached").remote().here.remote()))
"""
DRIVER = """
import sys, ray
try:
    ray.init(address=sys.argv[1])
except ConnectionError as error:
    print("refused:", error)
"""
JOB = """
import sys
from ray.job_submission import JobSubmissionClient
try:
    JobSubmissionClient(sys.argv[1]).submit_job(entrypoint="true")
except Exception as error:
    print("refused:", error)
"""
SSH_PORT = 22
DASHBOARD = 8265
CLIENT_SERVER = 10001
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with standing_hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.fixture
def clusters(hosts: SshHosts, tmp_path: Path) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path)
    yield clusters
    clusters.clean()


def bring_up(clusters: Clusters, hosts: SshHosts, *settings: str) -> str:
    """Bring up a cluster of the first host alone. Return the lines of `up`."""
    overrides = [f"python={sys.executable}", f"ssh_options=[-F, {hosts.config}]", "object_store_mib=100", "num_cpus=1"]
    _, err = clusters.run("up", "ssh", f"hosts=[{hosts.names[0]}]", *overrides, *settings, within_s=500)
    return err


def run_on(clusters: Clusters, hosts: SshHosts, index: int, *command: str, **environment: str) -> str:
    """Return the output of a Python program on a host."""
    done = subprocess.run(
        [*hosts.inside(index), sys.executable, *command],
        env={**clusters.environment, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen_by_a_stranger(clusters: Clusters, hosts: SshHosts, tmp_path: Path) -> dict[str, Any]:
    home = tmp_path / "stranger"
    home.mkdir()
    out = run_on(clusters, hosts, 1, str(STRANGER), hosts.addresses[0], str(home))
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def list_reachable_ports(clusters: Clusters) -> dict[int, str]:
    """Return the ports that `status` lists as open to other machines, with their processes."""
    (node,) = json.loads(clusters.run("status", "--json")[0])["nodes"]
    return {port: process for address, port, process in node["listening"] if not address.startswith("127.")}


def test_every_open_port_is_listed_and_refuses_whoever_has_no_token(
    clusters: Clusters, hosts: SshHosts, tmp_path: Path
) -> None:
    err = bring_up(clusters, hosts)
    assert "all interfaces" not in err
    (node,) = clusters.state("ssh")["nodes"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{node['folder']}/token"}
    head = f"{hosts.addresses[0]}:6379"
    assert run_on(clusters, hosts, 0, "-c", ACTOR, head, **token) == "here\n"

    report = seen_by_a_stranger(clusters, hosts, tmp_path)
    open_ports = set(report["ports"])
    reachable_ports = list_reachable_ports(clusters)
    assert open_ports - {SSH_PORT} <= reachable_ports.keys()
    assert 6379 in open_ports
    assert not {DASHBOARD, CLIENT_SERVER} & open_ports
    assert any(process.startswith("ray::Stays") for process in reachable_ports.values())

    # The head, the raylet with its store, the worker and the agent are each called, and each refuses.
    called_services = set()
    for port, code_by_method in report["answers"].items():
        assert code_by_method or int(port) == SSH_PORT, port
        for method, code in code_by_method.items():
            assert code in ("UNAUTHENTICATED", "401"), (port, method)
            called_services.add(method.rpartition("/")[0])
    services = (
        "NodeInfoGcsService",
        "NodeManagerService",
        "CoreWorkerService",
        "ReporterService",
        "ObjectManagerService",
    )
    assert {f"/ray.rpc.{service}" for service in services} <= called_services
    assert report["wrong_token"]["error"] == "AuthenticationError"
    assert report["wrong_token"]["seconds"] < 2

    home = {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "2"}
    assert "refused: " in run_on(clusters, hosts, 1, "-c", DRIVER, head, **home)
    dashboard = f"http://{hosts.addresses[0]}:{DASHBOARD}"
    assert "refused: Failed to connect" in run_on(clusters, hosts, 1, "-c", JOB, dashboard, **home)

    # Through the tunnel of `status` it is there, with the token.
    status = " ".join(clusters.run("status")[0].split())
    command = status.partition("dashboard: ")[2].split()
    assert command[:2] == ["ssh", "-N"]
    tunnel = subprocess.Popen([*command[: command.index(hosts.names[0]) + 1], "-o", "ExitOnForwardFailure=yes"])
    try:
        assert answer_of(f"http://127.0.0.1:{DASHBOARD}/api/jobs/", "") == 401
        secret = (clusters.folder("ssh") / "token").read_text()
        assert answer_of(f"http://127.0.0.1:{DASHBOARD}/api/jobs/", secret) == 200
    finally:
        tunnel.terminate()
        tunnel.wait()


def test_listening_on_all_interfaces_is_asked_for_and_warned_of(clusters: Clusters, hosts: SshHosts) -> None:
    warning = "listens on all interfaces (listen_on_all): only the token keeps others out"
    assert f"warning {warning}" in bring_up(clusters, hosts, "listen_on_all=true")
    assert warning in " ".join(clusters.run("status")[0].split())
    assert DASHBOARD in list_reachable_ports(clusters)
    dashboard = f"http://{hosts.addresses[0]}:{DASHBOARD}"
    assert answer_of(f"{dashboard}/api/jobs/", "") == 401
    assert answer_of(f"{dashboard}/api/jobs/", "0" * 64) == 403
    assert answer_of(f"{dashboard}/api/jobs/", (clusters.folder("ssh") / "token").read_text()) == 200


def answer_of(url: str, token: str) -> int:
    """Return the HTTP status of a page. Wait for a server that does not answer yet."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.2)
