"""What Kubernetes says of a cluster's pods. Pure."""

from typing import Any

from rlctl.cluster.state import ClusterNode

# A pod that waits for one of these waits for ever.
HOPELESS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CrashLoopBackOff")


def node_of(pod: dict[str, Any]) -> ClusterNode:
    """A pod as a node of the cluster."""
    name, head = pod["metadata"]["name"], pod["metadata"]["labels"].get("ray.io/node-type") == "head"
    return ClusterNode(name, name, "/tmp/ray", head, pod.get("status", {}).get("podIP", ""))


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether it runs, and answers its probes."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    return status.get("phase") == "Running" and bool(containers) and all(each["ready"] for each in containers)


def waits_for(pod: dict[str, Any]) -> str:
    """Why it is not ready, in a line."""
    status = pod.get("status", {})
    for each in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        for state in (each.get("state", {}), each.get("lastState", {})):
            detail = state.get("waiting") or state.get("terminated")
            if detail and detail.get("reason") not in ("PodInitializing", "ContainerCreating", "Completed", None):
                return f"{detail['reason']}: {detail.get('message', '')}".strip(": ").splitlines()[0]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'not scheduled')}: {condition.get('message', '')}".strip(": ")
    return str(status.get("reason") or status.get("phase") or "not there yet")


def is_hopeless(pod: dict[str, Any]) -> bool:
    """Whether it will not be ready as it is."""
    return waits_for(pod).partition(":")[0] in HOPELESS
