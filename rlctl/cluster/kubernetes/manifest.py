"""Manifests of a cluster and of a job for KubeRay (ray.io/v1), as plain values. Pure.

The operator creates the token and puts it into every pod's environment (authOptions, KubeRay 1.6). The manifests
contain names of Secrets, but no secret value. The head's service can be reached only inside Kubernetes.
"""

import shlex
from importlib.metadata import version
from typing import Any

from rlctl.cluster.ray_start import NODE_ENVIRONMENT
from rlctl.config.cluster_schema import KubernetesCluster

DASHBOARD_PORT = 8265
_LABELS = {"app.kubernetes.io/managed-by": "rlctl"}


def ray_cluster(config: KubernetesCluster) -> dict[str, Any]:
    """Return the RayCluster that `rlctl cluster up` applies."""
    return _object(config, "RayCluster", _cluster_spec(config))


def ray_job(config: KubernetesCluster, entrypoint: list[str]) -> dict[str, Any]:
    """Return a RayJob: a cluster that runs a command on its head and then ends. entrypoint: the command's words."""
    spec = {
        # A text, because the operator passes it to a shell.
        "entrypoint": shlex.join(entrypoint),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        # No retry: it would start from the beginning on a new cluster. The entrypoint must say if it resumes.
        "backoffLimit": 0,
        "rayClusterSpec": _cluster_spec(config),
    }
    return _object(config, "RayJob", spec)


def as_yaml(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML for `kubectl apply -f -`."""
    import yaml

    text: str = yaml.safe_dump(manifest, sort_keys=False, default_flow_style=False, width=120)
    return text


def _object(config: KubernetesCluster, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": config.name, "labels": dict(_LABELS)}
    if config.namespace:
        metadata["namespace"] = config.namespace
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _cluster_spec(config: KubernetesCluster) -> dict[str, Any]:
    """Return the part that a RayCluster and a RayJob share: the head without GPUs, and equal workers."""
    head: dict[str, Any] = {"cpu": config.head_cpus, "memory": config.head_memory}
    worker: dict[str, Any] = {"cpu": config.cpus_per_node, "memory": config.memory}
    if config.gpus_per_node:
        worker[config.gpu_resource] = config.gpus_per_node
    return {
        "rayVersion": config.ray_version or version("ray"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "enableIngress": False,
            # The operator and its jobs reach the dashboard through the service, which is not visible outside.
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": "0"},
            "template": _pod(config, "ray-head", head, config.head_shm),
        },
        "workerGroupSpecs": [
            {
                "groupName": "worker",
                "replicas": config.workers,
                "minReplicas": config.workers,
                "maxReplicas": config.workers,
                "rayStartParams": {},
                "template": _pod(config, "ray-worker", worker, config.shm),
            }
        ],
    }


def _pod(config: KubernetesCluster, container: str, resources: dict[str, Any], shm: str) -> dict[str, Any]:
    """Return a pod template. Requests equal limits, so that Kubernetes evicts the pod last."""
    # /dev/shm is a volume in memory, and counts toward the container's memory limit.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, claim in enumerate(config.volume_claims):
        name, _, path = claim.partition(":")
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": f"claim-{index}", "mountPath": path})
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": container,
                "image": config.image,
                "env": [{"name": name, "value": value} for name, value in NODE_ENVIRONMENT.items()],
                "envFrom": [{"secretRef": {"name": name}} for name in config.env_secrets],
                "resources": {"requests": resources, "limits": dict(resources)},
                "securityContext": {"allowPrivilegeEscalation": False, "privileged": False},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
        "nodeSelector": dict(pair.split("=", 1) for pair in config.node_selector),
        "tolerations": [_toleration(toleration) for toleration in config.tolerations],
        "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
    }
    if config.service_account:
        spec["serviceAccountName"] = config.service_account
    else:
        # Training does not call the Kubernetes API, so pods get no token for it.
        spec["automountServiceAccountToken"] = False
    # Without the empty lists of config keys that are not set.
    return {"metadata": {"labels": dict(_LABELS)}, "spec": {name: value for name, value in spec.items() if value != []}}


def _toleration(text: str) -> dict[str, str]:
    """Return the toleration for a text such as key, key=value or key=value:Effect, the form of kubectl's taints."""
    pair, _, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    toleration = {"key": key, "operator": "Exists"}
    if equals:
        toleration = {"key": key, "operator": "Equal", "value": value}
    if effect:
        toleration["effect"] = effect
    return toleration
