"""The Kubernetes objects of a cluster: valid by KubeRay's schema, with a token and shared memory, and no open port."""

from typing import Any

import pytest
import yaml

from rlctl.cluster.hosts import pod_host
from rlctl.cluster.kubernetes.kubectl import Kubectl, explain_errors, is_hopeless, is_ready, node_of, waits_for
from rlctl.cluster.kubernetes.manifest import as_yaml, ray_cluster, ray_job
from rlctl.config.cluster_schema import KubernetesCluster
from rlctl.config.errors import ConfigError
from rlctl.config.load_cluster import load_cluster
from tests.unit.cluster.kuberay_schema import RAY_CLUSTER, RAY_JOB, faults

FULL = ["workers=3", "namespace=lab", "service_account=trainer", "image_pull_secrets=[registry]", "env_secrets=[hf]"]
FULL += ["volume_claims=['models:/models', 'runs:/runs']", "node_selector=[gpu=h200]"]
FULL += ["tolerations=['nvidia.com/gpu:NoSchedule', 'team=rl:NoExecute', spot]"]


def config_of(*overrides: str) -> KubernetesCluster:
    config = load_cluster("kubernetes", ["image=me/rlctl:1", *overrides])
    assert isinstance(config, KubernetesCluster)
    return config


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"].get("rayClusterSpec") or manifest["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("overrides", [[], FULL, ["gpus_per_node=0", "ray_version=2.60.0"]])
def test_manifests_are_as_the_published_schema_has_them(overrides: list[str]) -> None:
    config = config_of(*overrides)
    assert faults(yaml.safe_load(as_yaml(ray_cluster(config))), RAY_CLUSTER) == []
    job = ray_job(config, ["rlctl", "train", "a b"])
    assert faults(yaml.safe_load(as_yaml(job)), RAY_JOB) == []


def test_the_schema_finds_what_is_wrong() -> None:
    manifest = ray_cluster(config_of())
    manifest["spec"]["authOptions"]["mode"] = "none"
    manifest["spec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] = 0
    manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["hostnetwork"] = True
    del manifest["spec"]["workerGroupSpecs"][0]["groupName"]
    manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = (
        "1 GB"
    )
    lines = faults(manifest, RAY_CLUSTER)
    assert len(lines) == 5, lines


def test_a_cluster_has_a_token_and_is_inside_alone() -> None:
    manifest = ray_cluster(config_of(*FULL))
    assert manifest["spec"]["authOptions"] == {"mode": "token"}
    head = manifest["spec"]["headGroupSpec"]
    assert (head["serviceType"], head["enableIngress"]) == ("ClusterIP", False)
    for pod in pods_of(manifest):
        assert "hostNetwork" not in pod
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "hf"}}]
    assert "automountServiceAccountToken" not in pods_of(manifest)[0]
    assert [pod["automountServiceAccountToken"] for pod in pods_of(ray_cluster(config_of()))] == [False, False]


def test_pods_ask_for_what_they_may_use_and_have_shared_memory_within_it() -> None:
    head, worker = pods_of(ray_cluster(config_of(*FULL, "memory=512Gi", "shm=100Gi")))
    resources = worker["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": 32, "memory": "512Gi", "nvidia.com/gpu": 8}
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert worker["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "100Gi"}}
    assert [mount["mountPath"] for mount in worker["containers"][0]["volumeMounts"]] == ["/dev/shm", "/models", "/runs"]
    assert worker["nodeSelector"] == {"gpu": "h200"}
    assert worker["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "rl", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
    ]


def test_a_job_has_a_cluster_of_its_own_and_takes_its_words_as_they_are() -> None:
    job = ray_job(config_of(), ["rlctl", "train", "grpo", "data.path=a b"])
    assert job["spec"]["entrypoint"] == "rlctl train grpo 'data.path=a b'"
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert job["spec"]["rayClusterSpec"] == ray_cluster(config_of())["spec"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name=Lab", "must be small letters, digits and dashes"),
        ("shm=256Gi", "must be less than memory, of which it is a part, 256Gi"),
        ("shm=lots", "not an amount as Kubernetes takes it, such as 64Gi: 'lots'"),
        ("head_shm=1Ti", "must be less than head_memory"),
        ("volume_claims=[models]", "each must be claim:/path, not 'models'"),
        ("node_selector=[gpu]", "each must be label=value, not 'gpu'"),
        ("tolerations=['a:Never']", "NoSchedule, PreferNoSchedule or NoExecute"),
        ("port=6379", "unknown key"),
    ],
)
def test_what_a_type_cannot_say(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(override)
    assert message in str(raised.value.problems[0])


def pod(phase: str, waiting: dict[str, str] | None = None, conditions: list[dict[str, str]] | None = None) -> Any:
    container = {"ready": phase == "Running" and not waiting, "state": {"waiting": waiting} if waiting else {}}
    status = {"phase": phase, "podIP": "10.1.0.1", "containerStatuses": [container], "conditions": conditions or []}
    return {"metadata": {"name": "x-head", "labels": {"ray.io/node-type": "head"}}, "status": status}


def test_why_a_pod_is_not_ready() -> None:
    assert is_ready(pod("Running"))
    node = node_of(pod("Running"))
    assert (node.name, node.head, node.address) == ("x-head", True, "10.1.0.1")
    image = pod("Pending", {"reason": "ImagePullBackOff", "message": "Back-off pulling image"})
    assert waits_for(image) == "ImagePullBackOff: Back-off pulling image"
    assert is_hopeless(image)
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}
    full = pod("Pending", conditions=[reason])
    assert waits_for(full) == "Unschedulable: 0/3 nodes: no GPU"
    assert not is_hopeless(full)
    assert waits_for(pod("Pending", {"reason": "ContainerCreating"})) == "Pending"


@pytest.mark.parametrize(
    ("message", "expected_text"),
    [
        ('error: resource mapping not found: no matches for kind "RayCluster" in version "ray.io/v1"', "not installed"),
        ('Error from server (BadRequest): strict decoding error: unknown field "spec.authOptions"', "too old"),
        (
            "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?",
            "no cluster answers",
        ),
        (
            'Error from server (Forbidden): rayclusters.ray.io is forbidden: User "u" cannot create',
            "you may not do that",
        ),
        ('error: context "x" does not exist', "set context="),
        ("error: something new", "something new"),
    ],
)
def test_what_kubectl_says_is_a_line(message: str, expected_text: str) -> None:
    assert expected_text in explain_errors(message)
    assert "\n" not in explain_errors(message)


def test_commands_name_context_and_namespace_where_they_are_set() -> None:
    assert Kubectl("", "").command("get", "pods") == ["kubectl", "get", "pods"]
    assert Kubectl("c", "n").command("get") == ["kubectl", "--context=c", "--namespace=n", "get"]
    command = pod_host("x-head", "python", "c", "n").command()
    assert command[-6:] == ["--quiet", "x-head", "--", "bash", "-c", "python -"]
