"""What a cluster is: the schema of `configs/cluster/*.yaml`, in the manner of `schema.py`."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.schema import spec


@dataclass
class CommonCluster:
    """What every kind shares."""

    name: str | None = spec("name of the cluster, as the other commands take it; null: the file's name")
    num_cpus: int | None = spec("CPUs that Ray gives out on each node; null: all cores", ge=1)
    num_gpus: int | None = spec("GPUs that Ray gives out on each node; null: all it finds", ge=0)
    object_store_mib: int | None = spec("shared memory of a node's object store; null: Ray's 30% of memory", ge=75)
    listen_on_all: bool = spec("the dashboard listens on all interfaces, and so does a local cluster's Ray")
    min_disk_gib: float = spec("a host with less free disk for Ray's files is refused", ge=0)
    start_timeout_s: float = spec("longest that a node may take to start, in seconds", gt=0)
    port: int = spec("where nodes and drivers meet the head; 0: a free one", ge=0, le=65535)
    dashboard_port: int = spec("dashboard and job API, on the head's loopback; 0: a free one", ge=0, le=65535)


@dataclass
class LocalCluster(CommonCluster):
    """Nodes on this machine (`rlctl cluster up`)."""

    kind: Literal["local"] = spec("kind of cluster")
    nodes: int = spec("Ray nodes, all on this machine: to try what a program does on several", ge=1, le=16)


@dataclass
class SshCluster(CommonCluster):
    """Hosts reached with the system's ssh and the user's own configuration and keys."""

    kind: Literal["ssh"] = spec("kind of cluster")
    hosts: list[str] = spec("hosts as ssh takes them, [user@]name; the first that is fit is the head")
    min_hosts: int | None = spec("go on, with a warning, when at least this many came up; null: all", ge=1)
    python: str = spec("interpreter on the hosts that has ray and rlctl; ~/ is the home there")
    ssh_options: list[str] = spec("further arguments of ssh, each an entry: [-p, '2222']")
    connect_timeout_s: int = spec("a host that ssh cannot reach for so long counts as down, in seconds", ge=1)
    max_clock_skew_s: float = spec("a host whose clock differs more from this machine's is refused", gt=0)
    storage: str = spec("folder on the hosts, of a file system that they share, for runs; ~/ is the home there")
    other_ports: list[int] | None = spec(
        "[first, last]: every other port that Ray listens on, for a firewall; null: any", ge=1024, le=65535
    )


@dataclass
class SlurmCluster(CommonCluster):
    """Nodes of a Slurm job; rlctl is on a machine that can submit one."""

    kind: Literal["slurm"] = spec("kind of cluster")
    nodes: int = spec("machines, each a Ray node; the first is the head", ge=1)
    partition: str | None = spec("where to queue; null: the site's default")
    account: str | None = spec("who pays; null: your default")
    qos: str | None = spec("quality of service; null: your default")
    time: str | None = spec("time limit, as sbatch takes it: 90, 4:00:00, 2-00:00:00; null: the partition's default")
    gpus_per_node: int | None = spec("GPUs to ask for on each node; null: none by us (see sbatch_options)", ge=0)
    cpus_per_task: int | None = spec("CPUs to ask for on each node; null: the site's default, often one", ge=1)
    exclusive: bool = spec("ask for whole nodes")
    constraint: str | None = spec("features that nodes must have, as sbatch takes them; null: none")
    sbatch_options: list[str] = spec("further options of sbatch, each an entry: [--mem=64G, --reservation=r]")
    python: str | None = spec("interpreter on the nodes that has ray and rlctl; null: the one that runs this")
    setup: list[str] = spec("lines of shell that each node runs first, such as 'module load cuda'")
    shared_folder: str | None = spec(
        "a folder that this machine and the nodes share; null: where rlctl keeps its clusters, in your home"
    )
    wait_s: float = spec("longest that the job may wait in the queue, in seconds", gt=0)
    other_ports: list[int] | None = spec(
        "[first, last]: every other port that Ray listens on, for a firewall; null: any", ge=1024, le=65535
    )


@dataclass
class KubernetesCluster:
    """Pods that the KubeRay operator keeps: one is the head, the others work."""

    name: str | None = spec("name of the cluster, and of what is applied; null: the file's name")
    kind: Literal["kubernetes"] = spec("kind of cluster")
    image: str = spec("container image that has ray and rlctl")
    context: str | None = spec("kubectl's context; null: the current one")
    namespace: str | None = spec("where it is applied; null: the context's")
    workers: int = spec("pods that work, beside the head", ge=1)
    gpus_per_node: int = spec("GPUs of each worker", ge=0)
    gpu_resource: str = spec("what Kubernetes calls a GPU there")
    cpus_per_node: int = spec("CPUs of each worker", ge=1)
    memory: str = spec("memory of each worker, shared memory counted in, such as 256Gi")
    shm: str = spec("shared memory of each worker (/dev/shm), such as 64Gi")
    head_cpus: int = spec("CPUs of the head", ge=1)
    head_memory: str = spec("memory of the head, shared memory counted in")
    head_shm: str = spec("shared memory of the head")
    python: str = spec("interpreter in the image that has ray and rlctl")
    ray_version: str | None = spec("Ray in the image; null: the one that is installed here")
    service_account: str | None = spec("service account of the pods; null: none, and no token of one")
    image_pull_secrets: list[str] = spec("names of Secrets that open the image's registry")
    env_secrets: list[str] = spec("names of Secrets whose keys become environment variables of every pod")
    storage: str = spec("folder in the pods for runs, best of a volume claim; ~/ is the home there")
    volume_claims: list[str] = spec("[claim:/path]: volume claims and where every pod sees them")
    node_selector: list[str] = spec("[label=value]: labels that nodes must have")
    tolerations: list[str] = spec("[key=value:Effect]: taints that pods put up with, as kubectl writes them")
    start_timeout_s: float = spec("longest that pods may take to be ready, nodes to be added included", gt=0)


HostCluster = LocalCluster | SshCluster | SlurmCluster
ClusterConfig = HostCluster | KubernetesCluster
CLUSTER_KINDS: dict[str, type[Any]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "slurm": SlurmCluster,
    "kubernetes": KubernetesCluster,
}
# Ports of a node besides the head's two: Ray's own, the rest for workers.
OWN_PORTS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen")
