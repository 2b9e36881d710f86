"""A Ray cluster of pods, by the KubeRay operator: applied, waited for, looked at and deleted with kubectl."""

import base64
import shlex
import time
from typing import Any

from rlctl.cluster.hosts import HostError
from rlctl.cluster.inspect import add_resources
from rlctl.cluster.kubernetes.kubectl import Kubectl
from rlctl.cluster.kubernetes.manifest import DASHBOARD_PORT, as_yaml, ray_cluster, ray_job
from rlctl.cluster.kubernetes.pods import is_hopeless, is_ready, node_of, waits_for
from rlctl.cluster.launcher import ClusterStatus, LogPlace, NodeStatus, PreparedCluster, Say
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore
from rlctl.config.cluster_schema import KubernetesCluster

_POLL_S, _QUERY_S, _GCS_PORT = 3.0, 40.0, 6379
_DELETE_S = 180.0


class KubernetesLauncher:
    """The kind `kubernetes`."""

    def prepare(self, config: KubernetesCluster, store: ClusterStore, say: Say) -> PreparedCluster:
        state = ClusterState(store.name, config.kind, "starting", config.python, "", False, time.time())
        state.context, state.namespace = config.context or "", config.namespace or ""
        state.storage = config.storage.rstrip("/")
        state.nodes = [ClusterNode("head", "", "", True, "")]
        kubectl, manifest = _kubectl(state), as_yaml(ray_cluster(config))
        say("doing", "asking Kubernetes")
        # The server looks at all of it, as it would if it were meant.
        kubectl.run("apply", "--dry-run=server", "--validate=strict", "--filename=-", stdin=manifest)
        if kubectl.get("raycluster", store.name):
            what = f"there is a RayCluster {store.name} already, which is not ours: set another name=..."
            raise ClusterError(f"{what}, or kubectl delete raycluster {store.name}")
        return PreparedCluster(state, PodStarter(config, store, state, manifest, say).start)

    def dry_run(self, config: KubernetesCluster, store: ClusterStore, job: str | None) -> str:
        if job is None:
            return as_yaml(ray_cluster(config))
        return as_yaml(ray_job(config, [config.python, "-m", "rlctl.cli.main", *shlex.split(job)]))

    def look(self, store: ClusterStore, state: ClusterState) -> ClusterStatus:
        kubectl = _kubectl(state)
        pods = _pods(kubectl, state.name)
        if not kubectl.get("raycluster", state.name):
            what = f"RayCluster {state.name} is gone: deleted by somebody; clear up: rlctl cluster down {state.name}"
            return ClusterStatus([NodeStatus(state.head)], [what])
        seen = [_seen(pod) for pod in pods]
        if not seen or not seen[0].node.head:
            seen.insert(0, NodeStatus(state.head, unreachable="its pod is not there yet"))
        warnings = [f"{each.node.name}: {each.unreachable}" for each in seen if each.unreachable]
        if seen[0].alive:
            warnings += _ask_ray(state, seen)
        return ClusterStatus(seen, warnings)

    def glance(self, state: ClusterState) -> str:
        return "up"

    def mend(
        self, config: KubernetesCluster, store: ClusterStore, state: ClusterState, seen: ClusterStatus, say: Say
    ) -> list[str]:
        # The operator brings a lost pod back by itself.
        return []

    def stop(self, store: ClusterStore, state: ClusterState, say: Say) -> list[str]:
        kubectl, end = _kubectl(state), time.monotonic() + _DELETE_S
        say("doing", f"deleting RayCluster {state.name}")
        try:
            kubectl.run("delete", "raycluster", state.name, "--ignore-not-found", "--wait=false")
            while pods := _pods(kubectl, state.name):
                if time.monotonic() > end:
                    names = ", ".join(pod["metadata"]["name"] for pod in pods)
                    say("bad", f"{names}: not gone {_DELETE_S:g} s after it was deleted: see `kubectl describe pod`")
                    return [f"RayCluster {state.name}"]
                time.sleep(_POLL_S)
        except ClusterError as error:
            say("bad", str(error))
            return [f"RayCluster {state.name}"]
        return []

    def logs(self, store: ClusterStore, state: ClusterState) -> list[LogPlace]:
        nodes = [node_of(pod) for pod in _pods(_kubectl(state), state.name) if is_ready(pod)]
        return [LogPlace(node.name, node.folder, state.host_of(node), None) for node in nodes]

    def environment(self, store: ClusterStore, state: ClusterState) -> dict[str, str]:
        store.check_token(state)
        found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(store.token_path)}
        return {**found, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}"}

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        forward = ("port-forward", f"service/{_service(state.name)}", f"{DASHBOARD_PORT}:{DASHBOARD_PORT}")
        command = " ".join(_kubectl(state).command(*forward))
        return command, f"the dashboard and job API, at http://127.0.0.1:{DASHBOARD_PORT}"


class PodStarter:
    """Applies the manifest and waits until every pod is ready."""

    def __init__(
        self, config: KubernetesCluster, store: ClusterStore, state: ClusterState, manifest: str, say: Say
    ) -> None:
        self._config, self._store, self._state, self._manifest, self._say = config, store, state, manifest, say
        self._kubectl = _kubectl(state)

    def start(self) -> list[str]:
        """Returns warnings. Raises ClusterError if not every pod came up."""
        state, kubectl = self._state, self._kubectl
        kubectl.run("apply", "--filename=-", stdin=self._manifest)
        self._say("ok", f"RayCluster {state.name} applied")
        self._wait(1 + self._config.workers)
        state.nodes = [node_of(pod) for pod in _pods(kubectl, state.name)]
        state.address, state.dashboard = f"{_service(state.name)}:{_GCS_PORT}", DASHBOARD_PORT
        secret = kubectl.get("secret", state.name).get("data", {}).get("auth_token")
        if not secret:
            what = f"KubeRay made no Secret {state.name} with a token: every pod there could use this cluster"
            raise ClusterError(f"{what}; install KubeRay 1.6 or newer")
        state.token_sha256 = self._store.keep_token(base64.b64decode(secret).decode())
        return []

    def _wait(self, count: int) -> None:
        began, told, ready = time.monotonic(), {}, set()  # type: float, dict[str, str], set[str]
        while len(ready) < count:
            for pod in _pods(self._kubectl, self._state.name):
                name = pod["metadata"]["name"]
                if is_ready(pod) and name not in ready:
                    ready.add(name)
                    self._say("ok", f"{name}: ready after {time.monotonic() - began:.0f} s")
                elif not is_ready(pod) and told.get(name) != (why := waits_for(pod)):
                    told[name] = why
                    self._say("bad" if is_hopeless(pod) else "warning", f"{name}: {why}")
                    if is_hopeless(pod):
                        raise ClusterError(f"{name} will not start: see `kubectl describe pod {name}`; nothing stands")
            if time.monotonic() > began + self._config.start_timeout_s:
                what = f"{len(ready)} of {count} pods are ready after {self._config.start_timeout_s:g} s"
                raise ClusterError(f"{what}; nothing stands: ask for less, or wait longer with start_timeout_s=...")
            self._say("doing", f"{len(ready)} of {count} pods are ready, {time.monotonic() - began:.0f} s")
            time.sleep(_POLL_S)


def _kubectl(state: ClusterState) -> Kubectl:
    return Kubectl(state.context, state.namespace)


def _service(name: str) -> str:
    # As the operator calls it.
    return f"{name}-head-svc"


def _pods(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """The cluster's, the head first."""
    pods: list[dict[str, Any]] = kubectl.get("pods", f"--selector=ray.io/cluster={name}").get("items", [])
    return sorted(pods, key=lambda pod: (not node_of(pod).head, pod["metadata"]["name"]))


def _seen(pod: dict[str, Any]) -> NodeStatus:
    node = node_of(pod)
    return NodeStatus(node, alive=True) if is_ready(pod) else NodeStatus(node, unreachable=waits_for(pod))


def _ask_ray(state: ClusterState, seen: list[NodeStatus]) -> list[str]:
    """What Ray gives out on each node; returns warnings."""
    # Its pods have the token in their environment.
    request: dict[str, Any] = {
        "address": f"127.0.0.1:{_GCS_PORT}",
        "token_path": None,
        "environment": {},
        "timeout_s": 5.0,
    }
    try:
        said = state.host_of(seen[0].node).run("query", request, _QUERY_S)
    except HostError as error:
        return [f"Ray does not answer: {error}"]
    if said["refused"]:
        return ["Ray refuses the token of its own head: was the Secret changed? start anew"]
    add_resources(seen, said["nodes"], "address")
    return []
