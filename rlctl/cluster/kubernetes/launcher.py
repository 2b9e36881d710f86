"""Launcher of Ray clusters in Kubernetes: applies, inspects and deletes a RayCluster of the KubeRay operator by
kubectl.
"""

import base64
import shlex
import time

from rlctl.cluster.hosts import HostError
from rlctl.cluster.inspect import add_resources, ray_query
from rlctl.cluster.kubernetes.kubectl import Kubectl, is_hopeless, is_ready, node_of, waits_for
from rlctl.cluster.kubernetes.manifest import DASHBOARD_PORT, as_yaml, ray_cluster, ray_job
from rlctl.cluster.launcher import ClusterStatus, Launcher, LogPlace, NodeStatus
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState
from rlctl.config.cluster_schema import KubernetesCluster

_POD_POLL_S = 3.0
_QUERY_S = 40.0
_GCS_PORT = 6379
_DELETE_S = 180.0


class KubernetesLauncher(Launcher):
    """The kind `kubernetes`. The operator replaces lost pods itself."""

    def prepare(self, config: KubernetesCluster) -> tuple[ClusterState, list[str]]:
        name = self._store.name
        state = ClusterState(
            name=name,
            kind=config.kind,
            phase="starting",
            python=config.python,
            token_sha256="",
            listen_on_all=False,
            created=time.time(),
            storage=config.storage.rstrip("/"),
            context=config.context or "",
            namespace=config.namespace or "",
            nodes=[ClusterNode(name="head", host="", folder="", head=True, address="")],
        )
        self._say("doing", "asking Kubernetes")
        # With these options the server validates the whole manifest and applies nothing.
        check_options = ("--dry-run=server", "--validate=strict", "--filename=-")
        _kubectl(state).run("apply", *check_options, stdin=as_yaml(ray_cluster(config)))
        if _kubectl(state).get("raycluster", name):
            problem = f"there is a RayCluster {name} already, which is not ours: set another name=..."
            raise ClusterError(f"{problem}, or kubectl delete raycluster {name}")
        return state, []

    def start(self, config: KubernetesCluster, state: ClusterState) -> list[str]:
        """Apply the manifest and wait until all pods are ready. Raises ClusterError if a pod does not become ready."""
        kubectl = _kubectl(state)
        kubectl.run("apply", "--filename=-", stdin=as_yaml(ray_cluster(config)))
        self._say("ok", f"RayCluster {state.name} applied")
        self._wait_for_pods(kubectl, 1 + config.workers, config.start_timeout_s)
        state.nodes = [node_of(pod) for pod in kubectl.pods(state.name)]
        state.address = f"{_service(state.name)}:{_GCS_PORT}"
        state.dashboard = DASHBOARD_PORT
        secret = kubectl.get("secret", state.name).get("data", {}).get("auth_token")
        if not secret:
            problem = f"KubeRay made no Secret {state.name} with a token: every pod there could use this cluster"
            raise ClusterError(f"{problem}; install KubeRay 1.6 or newer")
        state.token_sha256 = self._store.keep_token(base64.b64decode(secret).decode())
        return []

    def dry_run(self, config: KubernetesCluster, job: str | None) -> str:
        if job is None:
            return as_yaml(ray_cluster(config))
        return as_yaml(ray_job(config, [config.python, "-m", "rlctl.cli.main", *shlex.split(job)]))

    def status(self, state: ClusterState) -> ClusterStatus:
        kubectl = _kubectl(state)
        pods = kubectl.pods(state.name)
        if not kubectl.get("raycluster", state.name):
            warning = f"RayCluster {state.name} is gone: deleted by somebody; clear up: rlctl cluster down {state.name}"
            return ClusterStatus([NodeStatus(state.head)], [warning])
        statuses = []
        for pod in pods:
            # A pod that is not ready counts as unreachable, with the reason why it is not ready.
            reason = "" if is_ready(pod) else waits_for(pod)
            statuses.append(NodeStatus(node_of(pod), alive=is_ready(pod), unreachable=reason))
        if not statuses or not statuses[0].node.head:
            statuses.insert(0, NodeStatus(state.head, unreachable="its pod is not there yet"))
        warnings = [f"{status.node.name}: {status.unreachable}" for status in statuses if status.unreachable]
        if statuses[0].alive:
            warnings += self._ask_ray(state, statuses)
        return ClusterStatus(statuses, warnings)

    def quick_condition(self, state: ClusterState) -> str:
        # Nothing on this machine knows it, and Kubernetes may take seconds to answer.
        return "up"

    def stop(self, state: ClusterState) -> list[str]:
        kubectl = _kubectl(state)
        end = time.monotonic() + _DELETE_S
        self._say("doing", f"deleting RayCluster {state.name}")
        try:
            kubectl.run("delete", "raycluster", state.name, "--ignore-not-found", "--wait=false")
            while pods := kubectl.pods(state.name):
                if time.monotonic() > end:
                    names = ", ".join(pod["metadata"]["name"] for pod in pods)
                    problem = f"not gone {_DELETE_S:g} s after it was deleted: see `kubectl describe pod`"
                    raise ClusterError(f"{names}: {problem}")
                time.sleep(_POD_POLL_S)
        except ClusterError as error:
            self._say("bad", str(error))
            return [f"RayCluster {state.name}"]
        return []

    def logs(self, state: ClusterState) -> list[LogPlace]:
        nodes = [node_of(pod) for pod in _kubectl(state).pods(state.name) if is_ready(pod)]
        return [LogPlace(node=node.name, folder=node.folder, host=state.host_of(node), keep=None) for node in nodes]

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        forward = ("port-forward", f"service/{_service(state.name)}", f"{DASHBOARD_PORT}:{DASHBOARD_PORT}")
        command = " ".join(_kubectl(state).command(*forward))
        return command, f"the dashboard and job API, at http://127.0.0.1:{DASHBOARD_PORT}"

    def _wait_for_pods(self, kubectl: Kubectl, count: int, deadline_s: float) -> None:
        """Wait until `count` pods are ready, and report each new reason to wait. Raises ClusterError."""
        begin = time.monotonic()
        # Name of a pod -> reason that was reported last.
        reported_reasons: dict[str, str] = {}
        ready: set[str] = set()
        while len(ready) < count:
            for pod in kubectl.pods(self._store.name):
                name = pod["metadata"]["name"]
                if is_ready(pod):
                    if name not in ready:
                        ready.add(name)
                        self._say("ok", f"{name}: ready after {time.monotonic() - begin:.0f} s")
                    continue
                reason = waits_for(pod)
                if reported_reasons.get(name) == reason:
                    continue
                reported_reasons[name] = reason
                self._say("bad" if is_hopeless(pod) else "warning", f"{name}: {reason}")
                if is_hopeless(pod):
                    remedy = f"see `kubectl describe pod {name}`"
                    raise ClusterError(f"{name} will not start: {remedy}; nothing is left running")
            if time.monotonic() > begin + deadline_s:
                problem = f"{len(ready)} of {count} pods are ready after {deadline_s:g} s; nothing is left running"
                raise ClusterError(f"{problem}: ask for less, or wait longer with start_timeout_s=...")
            self._say("doing", f"{len(ready)} of {count} pods are ready, {time.monotonic() - begin:.0f} s")
            time.sleep(_POD_POLL_S)

    def _ask_ray(self, state: ClusterState, statuses: list[NodeStatus]) -> list[str]:
        """Ask Ray on the head, and add its resources to the status of each node. Return warnings."""
        # No token_path is needed: the pods have the token in their environment.
        request = ray_query(state) | {"address": f"127.0.0.1:{_GCS_PORT}", "token_path": None}
        try:
            reply = state.host_of(statuses[0].node).run("head.query", request, _QUERY_S)
        except HostError as error:
            return [f"Ray does not answer: {error}"]
        if reply["refused"]:
            return ["Ray refuses the token of its own head: was the Secret changed? start the cluster again"]
        add_resources(statuses, reply["nodes"], "address")
        return []


def _kubectl(state: ClusterState) -> Kubectl:
    return Kubectl(state.context, state.namespace)


def _service(name: str) -> str:
    # The operator gives the head's service this name.
    return f"{name}-head-svc"
