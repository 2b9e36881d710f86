"""A cluster and a job as KubeRay takes them (ray.io/v1): manifests as plain values. Pure.

The operator makes the token and puts it into every pod's environment (authOptions, KubeRay 1.6); no manifest of ours
holds a secret, but names of such. The head's service is inside of Kubernetes alone.
"""

import shlex
from importlib.metadata import version
from typing import Any

from rlctl.cluster.ray_start import NODE_ENVIRONMENT
from rlctl.config.cluster_schema import KubernetesCluster

API = "ray.io/v1"
GROUP = "worker"
DASHBOARD_PORT = 8265


def ray_cluster(config: KubernetesCluster) -> dict[str, Any]:
    """The RayCluster that `rlctl cluster up` applies."""
    return {"apiVersion": API, "kind": "RayCluster", "metadata": _metadata(config), "spec": _cluster_spec(config)}


def ray_job(
    config: KubernetesCluster,
    entrypoint: list[str],
    name: str | None = None,
    working_dir: str | None = None,
    environment: dict[str, str] | None = None,
    deadline_s: int | None = None,
) -> dict[str, Any]:
    """A RayJob: a cluster of its own that runs `entrypoint`, a command's words, on its head and then goes.

    name: of the job, the cluster's if left out. environment: of the job's processes, not for secrets, which all who
    may see jobs can read (see env_secrets). deadline_s: a job that takes longer is ended.
    """
    runtime: dict[str, Any] = {"working_dir": working_dir} if working_dir else {}
    runtime |= {"env_vars": environment} if environment else {}
    spec: dict[str, Any] = {
        # The operator gives it to a shell.
        "entrypoint": shlex.join(entrypoint),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        # Again means from the start, on a new cluster; who wants to resume says so in the entrypoint.
        "backoffLimit": 0,
        "rayClusterSpec": _cluster_spec(config),
    }
    if runtime:
        spec["runtimeEnvYAML"] = as_yaml(runtime)
    if deadline_s is not None:
        spec["activeDeadlineSeconds"] = deadline_s
    return {"apiVersion": API, "kind": "RayJob", "metadata": _metadata(config, name), "spec": spec}


def as_yaml(manifest: dict[str, Any]) -> str:
    """As `kubectl apply -f -` takes it."""
    import yaml

    text: str = yaml.safe_dump(manifest, sort_keys=False, default_flow_style=False, width=120)
    return text


def _metadata(config: KubernetesCluster, name: str | None = None) -> dict[str, Any]:
    found = {"name": name or config.name, "labels": {"app.kubernetes.io/managed-by": "rlctl"}}
    return found | ({"namespace": config.namespace} if config.namespace else {})


def _cluster_spec(config: KubernetesCluster) -> dict[str, Any]:
    worker = _resources(config.cpus_per_node, config.memory)
    if config.gpus_per_node:
        worker[config.gpu_resource] = config.gpus_per_node
    return {
        "rayVersion": config.ray_version or version("ray"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "enableIngress": False,
            # The operator and its jobs come to it through the service; who is outside does not.
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": "0"},
            "template": _pod(config, "ray-head", _resources(config.head_cpus, config.head_memory), config.head_shm),
        },
        "workerGroupSpecs": [
            {
                "groupName": GROUP,
                "replicas": config.workers,
                "minReplicas": config.workers,
                "maxReplicas": config.workers,
                "rayStartParams": {},
                "template": _pod(config, "ray-worker", worker, config.shm),
            }
        ],
    }


def _resources(cpus: int, memory: str) -> dict[str, Any]:
    return {"cpu": cpus, "memory": memory}


def _pod(config: KubernetesCluster, container: str, resources: dict[str, Any], shm: str) -> dict[str, Any]:
    """A pod's template. What is asked for is what it may use, so that it is the last to be put out."""
    # In memory, and counted in the container's limit.
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
        "tolerations": [_toleration(each) for each in config.tolerations],
        "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
    }
    if config.service_account:
        spec["serviceAccountName"] = config.service_account
    else:
        # Training has nothing to say to Kubernetes.
        spec["automountServiceAccountToken"] = False
    labels = {"app.kubernetes.io/managed-by": "rlctl"}
    return {"metadata": {"labels": labels}, "spec": {name: value for name, value in spec.items() if value != []}}


def _toleration(text: str) -> dict[str, str]:
    """key, key=value, each with :Effect or without, as kubectl writes taints."""
    pair, _, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})
