"""`rlctl cluster` and kubectl: answers without kubectl and without a cluster, and the words they exchange.

No Kubernetes is started here. Where one would answer, a stand-in for kubectl does: it shows the right commands and the
reading of answers, but nothing about KubeRay. Another test holds the manifests to KubeRay's schema.
"""

import json
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest
import yaml

from tests.system.clusters import Clusters

# Keeps applied objects as a file; its pods are ready at once, or wait for the condition of the file `wait`.
KUBECTL = """#!{python}
import base64, json, os, pathlib, sys
home = pathlib.Path(os.environ["STAND_IN"])
words = [word for word in sys.argv[1:] if not word.startswith("--")]
with open(home / "said", "a") as said:
    said.write(json.dumps(sys.argv[1:]) + chr(10))
applied = home / "applied"
if words[0] == "apply":
    text = sys.stdin.read()
    if "--dry-run=server" not in sys.argv:
        applied.write_text(text)
elif words[0] == "delete":
    applied.unlink(missing_ok=True)
elif words[:2] == ["get", "raycluster"] and applied.exists():
    print(json.dumps({{"kind": "RayCluster"}}))
elif words[:2] == ["get", "secret"]:
    print(json.dumps({{"data": {{"auth_token": base64.b64encode(b"t0ken").decode()}}}}))
elif words[:2] == ["get", "pods"]:
    pods = []
    for name, kind in (("lab-head", "head"), ("lab-worker-1", "worker")) if applied.exists() else ():
        waits = (home / "wait").read_text() if (home / "wait").exists() else ""
        state = {{"waiting": {{"reason": waits}}}} if waits else {{}}
        status = {{"phase": "Running", "podIP": "10.0.0.1" if kind == "head" else "10.0.0.2"}}
        status["containerStatuses"] = [{{"ready": not waits, "state": state}}]
        pods.append({{"metadata": {{"name": name, "labels": {{"ray.io/node-type": kind}}}}, "status": status}})
    print(json.dumps({{"items": pods}}))
elif words[0] == "exec":
    sys.stdin.read()
    nodes = [dict(name="", address=f"10.0.0.{{i}}", alive=True, total=dict(CPU=8), free=dict(CPU=8)) for i in (1, 2)]
    print("@rlctl " + json.dumps(dict(refused=False, nodes=nodes)))
"""
UP = ("up", "kubernetes", "name=lab", "image=me/rlctl:1")


@pytest.fixture
def stand_in(tmp_path: Path) -> Clusters:
    """Clusters whose kubectl is `KUBECTL`."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return Clusters(tmp_path, PATH=f"{program.parent}:{os.environ['PATH']}", STAND_IN=str(tmp_path))


def test_a_dry_run_is_yaml_and_needs_no_kubectl(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path, PATH=str(tmp_path))
    out, _ = clusters.run(*UP, "--dry-run")
    assert yaml.safe_load(out)["spec"]["authOptions"] == {"mode": "token"}
    assert not clusters.folder("lab").exists()


def test_without_kubectl_and_without_a_cluster_it_is_a_line(tmp_path: Path) -> None:
    _, err = Clusters(tmp_path, PATH=str(tmp_path)).run(*UP, code=1)
    assert err == "error: kubectl is not found: install it, or print the manifest alone with --dry-run\n"
    if not shutil.which("kubectl"):
        pytest.skip("not installed: kubectl")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        config |= {"clusters": [{"name": "c", "cluster": {"server": server}}], "users": []}  # type: ignore[dict-item]
        config |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}]}  # type: ignore[dict-item]
        (tmp_path / "config").write_text(json.dumps(config))
        clusters = Clusters(tmp_path, KUBECONFIG=str(tmp_path / "config"))
        _, err = clusters.run(*UP, code=1)
        assert err == "error: kubectl: no cluster answers: see `kubectl cluster-info`, then set context=...\n"
        _, err = clusters.run(*UP, "context=nope", code=1)
        assert "set context=..." in err
    assert not clusters.folder("lab").exists()


def test_applied_looked_at_and_deleted(stand_in: Clusters, tmp_path: Path) -> None:
    out, err = stand_in.run(*UP, "namespace=ns")
    assert "ok      lab-worker-1: ready after" in err
    assert "lab is up: 2 nodes, 16 CPUs, 0 GPUs, at lab-head-svc:6379" in out
    assert "kubectl --namespace=ns port-forward service/lab-head-svc 8265:8265" in out
    token = stand_in.folder("lab") / "token"
    assert (token.read_text(), token.stat().st_mode & 0o077) == ("t0ken", 0)
    assert yaml.safe_load((tmp_path / "applied").read_text())["kind"] == "RayCluster"
    assert "lab is up already" in stand_in.run(*UP)[0]
    seen = json.loads(stand_in.run("status", "--json")[0])
    assert [node["condition"] for node in seen["nodes"]] == ["up", "up"]
    assert max(map(len, stand_in.run("status")[0].splitlines())) <= 80
    assert stand_in.run("list")[0].splitlines()[1].split()[:4] == ["lab", "kubernetes", "up", "2"]
    assert "RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265" in stand_in.run("env")[0]

    (tmp_path / "wait").write_text("CrashLoopBackOff")
    assert "lab-head: CrashLoopBackOff" in " ".join(stand_in.run("status", code=1)[0].split())
    assert "lab is down" in stand_in.run("down")[0]
    assert not (tmp_path / "applied").exists()
    assert not stand_in.folder("lab").exists()
    log = (tmp_path / "said").read_text()
    commands = [json.loads(line) for line in log.splitlines()]
    assert all("--namespace=ns" in words for words in commands)
    assert "t0ken" not in log


def test_a_pod_that_cannot_start_ends_it_and_leaves_nothing(stand_in: Clusters, tmp_path: Path) -> None:
    (tmp_path / "wait").write_text("ImagePullBackOff")
    _, err = stand_in.run(*UP, code=1)
    assert "failed  lab-head: ImagePullBackOff\n" in err
    assert "error: lab-head will not start: see `kubectl describe pod lab-head`; nothing is left running" in err
    assert not (tmp_path / "applied").exists()
    assert not stand_in.folder("lab").exists()
