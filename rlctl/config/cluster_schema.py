"""What a cluster is: the schema of `configs/cluster/*.yaml`, in the manner of `schema.py`."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Literal

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
    other_ports: list[int] | None = spec(
        "[first, last]: every other port that Ray listens on, for a firewall; null: any", ge=1024, le=65535
    )


ClusterConfig = LocalCluster | SshCluster
CLUSTER_KINDS: dict[str, type[LocalCluster] | type[SshCluster]] = {"local": LocalCluster, "ssh": SshCluster}
# Ports of a node besides the head's two: Ray's own, the rest for workers.
OWN_PORTS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen")
