"""Calls of the user's kubectl. Each error is one line with the remedy. Functions that read the status of pods."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from rlctl.cluster.hosts import kubectl_command, last_line, remedy_of
from rlctl.cluster.state import ClusterError, ClusterNode

_ANSWER_S = 60.0
_INSTALL = "helm install kuberay-operator kuberay/kuberay-operator, version 1.6 or newer"
_NO_ANSWER = "no cluster answers: see `kubectl cluster-info`, then set context=..."
_UNKNOWN_USER = "it does not know you: log in again, and see that `kubectl get pods` works"
# Text in kubectl's error output -> remedy.
_REMEDIES = {
    'no matches for kind "RayCluster"': f"KubeRay is not installed there: {_INSTALL}",
    'unknown field "spec.authOptions"': f"its KubeRay is too old to set a token: {_INSTALL}",
    "the server doesn't have a resource type": f"KubeRay is not installed there: {_INSTALL}",
    "forbidden": "you may not do that there: {error}",
    "context was not found": "no such context: see `kubectl config get-contexts`, then set context=...",
    "does not exist": "{error}; see `kubectl config get-contexts`, then set context=...",
    "current-context is not set": "no cluster is chosen: see `kubectl config get-contexts`, then set context=...",
    "connection to the server": _NO_ANSWER,
    "unable to connect to the server": _NO_ANSWER,
    "dial tcp": _NO_ANSWER,
    "i/o timeout": _NO_ANSWER,
    "must be logged in": _UNKNOWN_USER,
    "unauthorized": _UNKNOWN_USER,
}
# Reasons of a waiting container with which a pod never becomes ready.
_HOPELESS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CrashLoopBackOff")


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context and a namespace. Empty means kubectl's default."""

    context: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """Return the whole command for these arguments."""
        return [*kubectl_command(self.context, self.namespace), *arguments]

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl and return its output. Raises ClusterError."""
        if not shutil.which("kubectl"):
            raise ClusterError("kubectl is not found: install it, or print the manifest alone with --dry-run")
        try:
            done = subprocess.run(
                self.command(f"--request-timeout={_ANSWER_S:g}s", *arguments),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S + 10,
                check=False,
                # In a new session, so that Ctrl-C reaches only this process.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"kubectl: no answer within {_ANSWER_S:g} s: see `kubectl cluster-info`") from None
        if done.returncode:
            raise ClusterError(f"kubectl: {explain_errors(done.stderr)}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return a Kubernetes object or list of objects; empty if there is none."""
        text = self.run("get", *arguments, "--ignore-not-found", "--output=json")
        objects: dict[str, Any] = json.loads(text or "{}")
        return objects

    def pods(self, cluster: str) -> list[dict[str, Any]]:
        """Return the pods of a Ray cluster, the head first."""
        pods: list[dict[str, Any]] = self.get("pods", f"--selector=ray.io/cluster={cluster}").get("items", [])
        return sorted(pods, key=lambda pod: (not node_of(pod).head, pod["metadata"]["name"]))


def explain_errors(errors: str) -> str:
    """Return kubectl's error, with the remedy if it is known, in one line."""
    complaint = last_line(errors).removeprefix("error: ").removeprefix("Error from server ") or "it said nothing"
    remedy = remedy_of(errors, _REMEDIES)
    return remedy.format(error=complaint) if remedy else complaint


def node_of(pod: dict[str, Any]) -> ClusterNode:
    """Return the cluster node for a pod."""
    name = pod["metadata"]["name"]
    return ClusterNode(
        name=name,
        host=name,
        folder="/tmp/ray",
        head=pod["metadata"]["labels"].get("ray.io/node-type") == "head",
        address=pod.get("status", {}).get("podIP", ""),
    )


def is_ready(pod: dict[str, Any]) -> bool:
    """Return True if the pod runs and answers its probes."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    all_ready = bool(containers) and all(container["ready"] for container in containers)
    return status.get("phase") == "Running" and all_ready


def waits_for(pod: dict[str, Any]) -> str:
    """Return in one line why the pod is not ready."""
    status = pod.get("status", {})
    # First an error of a container, then the scheduler's reason, then the pod's phase.
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        for state in (container.get("state", {}), container.get("lastState", {})):
            detail = state.get("waiting") or state.get("terminated")
            # These reasons are steps of a usual start.
            if detail and detail.get("reason") not in ("PodInitializing", "ContainerCreating", "Completed", None):
                return f"{detail['reason']}: {detail.get('message', '')}".strip(": ").splitlines()[0]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'not scheduled')}: {condition.get('message', '')}".strip(": ")
    return str(status.get("reason") or status.get("phase") or "not there yet")


def is_hopeless(pod: dict[str, Any]) -> bool:
    """Return True if the pod will never become ready."""
    return waits_for(pod).partition(":")[0] in _HOPELESS
