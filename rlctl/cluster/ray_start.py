"""Arguments of `ray start`, and environment variables, for each node of a cluster. Pure."""

from dataclasses import dataclass
from typing import Any

from rlctl.cluster.state import ClusterNode, ClusterState
from rlctl.config.cluster_schema import OWN_PORTS, HostCluster, LocalCluster
from rlctl.workers import ENVIRONMENT, LOOPBACK_ONLY

LOOPBACK = "127.0.0.1"
# Text in Ray's log if its processes did not start within 30 s, a constant of Ray's code. A busy machine may take
# longer.
TOO_SLOW = "timed out during startup"
NO_DASHBOARD = "no dashboard, no job API: install 'ray[default]' on the {where} for them"
_MIN_STORE = 75 << 20
_NO_METRICS = {name: ENVIRONMENT[name] for name in ENVIRONMENT if "metric" in name.lower()}
# Ray notices a lost host after about 10 s instead of a minute. A busy node must not pause for longer.
_FOR_HEAD = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
# A stopped job first saves a checkpoint. By default Ray would kill it after 3 s.
_FOR_JOBS = {"RAY_JOB_STOP_WAIT_TIME_S": "600"}
# Turns off the event statistics that Ray's processes log every minute. They would hide all other lines.
_NO_STATISTICS = {"RAY_event_stats_print_interval_ms": "0"}
_FOR_NODES = (
    "RAY_USAGE_STATS_ENABLED",
    "RAY_worker_niceness",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_task_events_report_interval_ms",
)
# By default Ray ends its processes a minute after the head is gone, without a message. A run may need longer to finish
# its step and save.
_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
# Environment variables of every node of every kind of cluster, without the token.
NODE_ENVIRONMENT = {name: ENVIRONMENT[name] for name in _FOR_NODES} | _FOR_JOBS | _PATIENCE


@dataclass(frozen=True)
class Place:
    """Host on which a node will be started, with facts from its check."""

    name: str
    host: str
    address: str
    # Folder in which the node's folder will be created.
    root: str
    # Bytes of shared memory.
    shm_bytes: int
    # True if the host can serve Ray's dashboard and job API.
    has_dashboard: bool


def is_loopback(address: str) -> bool:
    """Return True if other machines cannot reach the address."""
    return address.startswith("127.") or address == "::1"


def join_address(address: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def start_request(
    config: HostCluster, state: ClusterState, node: ClusterNode, place: Place, token: str
) -> dict[str, Any]:
    """Return the request for `start` of `remote_scripts/node.py`."""
    is_first_of_host = node is next(other for other in state.nodes if other.host == node.host)
    is_on_loopback = is_loopback(node.address)
    environment = NODE_ENVIRONMENT | _NO_METRICS | _NO_STATISTICS | (LOOPBACK_ONLY if is_on_loopback else {})
    if config.kind == "local":
        environment["RAY_memory_monitor_refresh_ms"] = ENVIRONMENT["RAY_memory_monitor_refresh_ms"]
    if node.head:
        environment |= _FOR_HEAD
        # `start` of node.py replaces {port} by a free port, for a configured port of 0.
        arguments = ["--head", f"--port={config.port or '{port}'}"]
        arguments += [f"--dashboard-host={'0.0.0.0' if config.listen_on_all else LOOPBACK}"]
        arguments += [f"--dashboard-port={config.dashboard_port or '{port}'}"]
    else:
        arguments = [f"--address={state.address}"]
    arguments += [f"--node-ip-address={node.address}", f"--node-name={node.name}", "--disable-usage-stats"]
    arguments += _resources(config, place, is_first_of_host)
    if isinstance(config, LocalCluster) or config.other_ports is None:
        arguments += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    else:
        # The node's own processes take the first ports of the range, its workers the rest.
        low, high = config.other_ports
        arguments += [f"--{name}-port={low + index}" for index, name in enumerate(OWN_PORTS)]
        arguments += [f"--min-worker-port={low + len(OWN_PORTS)}", f"--max-worker-port={high}"]
    # Only one node per machine gets a log monitor: with more, each line of a worker would arrive several times.
    if not is_first_of_host:
        arguments.append("--include-log-monitor=false")
    return {
        "root": place.root,
        "folder": node.folder.rpartition("/")[2],
        "token": token,
        "arguments": arguments,
        "environment": environment,
        "joins_loopback": is_on_loopback and not node.head,
    }


def _resources(config: HostCluster, place: Place, is_first_of_host: bool) -> list[str]:
    """Return the arguments with a node's CPUs, GPUs and object store. Without an argument Ray counts them itself."""
    arguments = [] if config.num_cpus is None else [f"--num-cpus={config.num_cpus}"]
    gpus = config.num_gpus
    # Several nodes on one machine are a simulation: only the first of them may count the machine's GPUs.
    if gpus is None and not is_first_of_host:
        gpus = 0
    if gpus is not None:
        arguments.append(f"--num-gpus={gpus}")
    if config.object_store_mib is not None:
        nodes = config.nodes if isinstance(config, LocalCluster) else 1
        configured_bytes = config.object_store_mib << 20
        # The stores of all nodes on the host may take half of its shared memory. 0: its size is not known.
        most_bytes = place.shm_bytes // (2 * nodes) or configured_bytes
        arguments.append(f"--object-store-memory={max(_MIN_STORE, min(configured_bytes, most_bytes))}")
    return arguments
