"""Schema of a cluster's config: one dataclass for each kind, with the keys of `configs/cluster/*.yaml`."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.fields import spec

_OTHER_PORTS = "[first, last]: the range of every other port that Ray listens on, for a firewall. null is any port."


@dataclass
class CommonCluster:
    """Keys of every cluster whose nodes are hosts."""

    name: str | None = spec("The name of the cluster in other commands. null is the file's name.")
    num_cpus: int | None = spec("The CPUs that Ray gives out on each node. null is all cores.", ge=1)
    num_gpus: int | None = spec("The GPUs that Ray gives out on each node. null is all that it finds.", ge=0)
    object_store_mib: int | None = spec(
        "The shared memory of a node's object store, in MiB. null is Ray's own choice, 30% of memory.", ge=75
    )
    listen_on_all: bool = spec("The dashboard listens on all interfaces, and so does the Ray of a local cluster.")
    min_disk_gib: float = spec("A host with less free disk for Ray's files than this, in GiB, is refused.", ge=0)
    start_timeout_s: float = spec("The longest start of a node, in seconds.", gt=0)
    port: int = spec("The port where nodes and drivers reach the head. 0 is a free one.", ge=0, le=65535)
    dashboard_port: int = spec(
        "The port of the dashboard and the job API, on the head's loopback. 0 is a free one.", ge=0, le=65535
    )


@dataclass
class LocalCluster(CommonCluster):
    """Nodes on this machine (`rlctl cluster up`)."""

    kind: Literal["local"] = spec("The kind of cluster.")
    nodes: int = spec(
        "The Ray nodes, all on this machine. More than one shows how a program behaves on several.", ge=1, le=16
    )


@dataclass
class SshCluster(CommonCluster):
    """Hosts reached with the system's ssh and the user's own configuration and keys."""

    kind: Literal["ssh"] = spec("The kind of cluster.")
    hosts: list[str] = spec("Hosts as ssh takes them, [user@]name. The first that is fit is the head.")
    min_hosts: int | None = spec("Go on, with a warning, if at least this many hosts start. null needs all.", ge=1)
    python: str = spec("The interpreter on the hosts that has ray and rlctl. ~/ is the home directory there.")
    ssh_options: list[str] = spec("Further arguments of ssh, each an entry: [-p, '2222'].")
    connect_timeout_s: int = spec("A host that ssh does not reach within this many seconds is down.", ge=1)
    max_clock_skew_s: float = spec(
        "A host whose clock differs from this machine's by more seconds than this is refused.", gt=0
    )
    storage: str = spec(
        "The folder for runs on the hosts, in a file system that they share. ~/ is the home directory there."
    )
    other_ports: list[int] | None = spec(_OTHER_PORTS, ge=1024, le=65535)


@dataclass
class SlurmCluster(CommonCluster):
    """Nodes of a Slurm job, submitted from this machine."""

    kind: Literal["slurm"] = spec("The kind of cluster.")
    nodes: int = spec("The machines, each a Ray node. The first is the head.", ge=1)
    partition: str | None = spec("The partition. null is the site's default.")
    account: str | None = spec("The account that pays. null is your default.")
    qos: str | None = spec("The quality of service. null is your default.")
    time: str | None = spec(
        "The time limit as sbatch takes it: 90, 4:00:00, 2-00:00:00. null is the partition's default."
    )
    gpus_per_node: int | None = spec("The GPUs to ask for on each node. null asks for none (see sbatch_options).", ge=0)
    cpus_per_task: int | None = spec("The CPUs to ask for on each node. null is the site's default, often one.", ge=1)
    exclusive: bool = spec("Ask for whole nodes.")
    constraint: str | None = spec("Features that nodes must have, as sbatch takes them. null is none.")
    sbatch_options: list[str] = spec("Further options of sbatch, each an entry: [--mem=64G, --reservation=r].")
    python: str | None = spec(
        "The interpreter on the nodes that has ray and rlctl. null is the one that runs this command."
    )
    setup: list[str] = spec("Lines of shell that each node runs first, such as 'module load cuda'.")
    shared_folder: str | None = spec(
        "A folder that this machine and the nodes share. null is rlctl's folder for clusters in your home directory."
    )
    wait_s: float = spec("The longest wait of the job in the queue, in seconds.", gt=0)
    other_ports: list[int] | None = spec(_OTHER_PORTS, ge=1024, le=65535)


@dataclass
class KubernetesCluster:
    """Pods of the KubeRay operator: one is the head, the others work."""

    name: str | None = spec("The name of the cluster and of its Kubernetes objects. null is the file's name.")
    kind: Literal["kubernetes"] = spec("The kind of cluster.")
    image: str = spec("The container image that has ray and rlctl.")
    context: str | None = spec("The context of kubectl. null is the current one.")
    namespace: str | None = spec("The namespace. null is the context's.")
    workers: int = spec("The worker pods, besides the head.", ge=1)
    gpus_per_node: int = spec("The GPUs of each worker.", ge=0)
    gpu_resource: str = spec("The name of a GPU as a resource in this Kubernetes.")
    cpus_per_node: int = spec("The CPUs of each worker.", ge=1)
    memory: str = spec("The memory of each worker, shared memory included, such as 256Gi.")
    shm: str = spec("The shared memory of each worker (/dev/shm), such as 64Gi.")
    head_cpus: int = spec("The CPUs of the head.", ge=1)
    head_memory: str = spec("The memory of the head, shared memory included.")
    head_shm: str = spec("The shared memory of the head.")
    python: str = spec("The interpreter in the image that has ray and rlctl.")
    ray_version: str | None = spec("The version of Ray in the image. null is the one that is installed here.")
    service_account: str | None = spec("The service account of the pods. null is none, and no token.")
    image_pull_secrets: list[str] = spec("Names of Secrets that open the image's registry.")
    env_secrets: list[str] = spec("Names of Secrets whose keys become environment variables of every pod.")
    storage: str = spec(
        "The folder for runs in the pods, preferably of a volume claim. ~/ is the home directory there."
    )
    volume_claims: list[str] = spec("[claim:/path]: volume claims, and where every pod mounts them.")
    node_selector: list[str] = spec("[label=value]: labels that nodes must have.")
    tolerations: list[str] = spec("[key=value:Effect]: taints that the pods tolerate, as kubectl writes them.")
    start_timeout_s: float = spec(
        "The longest time until all pods are ready, in seconds, including nodes that are added.", gt=0
    )


HostCluster = LocalCluster | SshCluster | SlurmCluster
ClusterConfig = HostCluster | KubernetesCluster
CLUSTER_KINDS: dict[str, type[Any]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "slurm": SlurmCluster,
    "kubernetes": KubernetesCluster,
}
# Ray's own ports on each node. The other ports of `other_ports` are for workers.
OWN_PORTS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen")
