"""Data for `rlctl cluster status`, `list` and `logs`."""

import subprocess
from typing import Any

from rlctl.cluster.hosts import Host, HostCalls, end
from rlctl.cluster.launcher import ClusterStatus, LogPlace, launcher_of
from rlctl.cluster.ray_start import is_loopback
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster, known_clusters, not_up
from rlctl.config.errors import did_you_mean

_RUNS_S = 40.0


def cluster_status(state: ClusterState) -> ClusterStatus:
    """Return the current status of a cluster with its runs. Raises ClusterError if Ray refuses the token."""
    calls = []
    if state.dashboard:
        request = {"op": "runs", "dashboard": state.dashboard, "token_path": f"{state.head.folder}/token"}
        calls.append((state.host_of(state.head), "head.job", request))
    with HostCalls(calls, _RUNS_S) as running:
        # The head lists its runs while the launcher asks the nodes. If it does not answer, the status has no runs.
        status = launcher_of(state).status(state)
        for _, reply in running.answers():
            if isinstance(reply, dict):
                status.runs += reply.get("runs", [])
    return status


def open_ports(status: ClusterStatus) -> list[str]:
    """Return the ports that other machines can reach (not only on loopback), one line per node."""
    lines = []
    for node_status in status.nodes:
        ports = [
            f"{port} {process}"
            for address, port, process in node_status.facts.get("listening", [])
            if not is_loopback(address)
        ]
        if ports:
            lines.append(f"{node_status.node.name}: {', '.join(ports)}")
    return lines


def as_dict(state: ClusterState, status: ClusterStatus) -> dict[str, Any]:
    """Return the status in the form that `--json` prints."""
    nodes = []
    for node_status in status.nodes:
        entry = {name: getattr(node_status.node, name) for name in ("name", "host", "head", "address", "pid")}
        entry["condition"] = node_status.condition
        entry["unreachable"] = node_status.unreachable
        entry["resources"] = node_status.total
        entry["free"] = node_status.free
        nodes.append(entry | node_status.facts)
    return {
        "name": state.name,
        "kind": state.kind,
        "condition": status.condition,
        "address": state.address,
        "dashboard_port": state.dashboard or None,
        "created": state.created,
        "warnings": status.warnings,
        "runs": status.runs,
        "nodes": nodes,
    }


def summary(state: ClusterState, status: ClusterStatus) -> str:
    """Return a cluster's resources in one line."""
    up = [node for node in status.nodes if node.in_ray]
    count = len(status.nodes)
    nodes = f"{len(up)} of {count} nodes" if len(up) < count else f"{count} node{'' if count == 1 else 's'}"
    amounts = {name: sum(node.total.get(name, 0) for node in up) for name in ("CPU", "GPU")}
    devices = ", ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in amounts.items())
    return f"{nodes}, {devices}, at {state.address}"


def all_clusters() -> list[dict[str, Any]]:
    """Return an entry for every cluster that is up or has logs. No other machine is asked."""
    return [_cluster_entry(name) for name in known_clusters()]


def _cluster_entry(name: str) -> dict[str, Any]:
    """Return the entry of one cluster in `rlctl cluster list`."""
    entry = {"name": name, "kind": "", "condition": "down", "nodes": 0, "address": ""}
    try:
        state = ClusterStore(name).load()
    except ClusterError:
        return entry | {"condition": "damaged"}
    if state is None:
        return entry
    unfinished = {"starting": "half started", "stopping": "half stopped"}
    condition = unfinished.get(state.phase) or launcher_of(state).quick_condition(state)
    facts = {"kind": state.kind, "nodes": len(state.nodes), "address": state.address}
    return entry | facts | {"condition": condition}


def show_logs(name: str, node: str | None, follow: bool, lines: int) -> int:
    """Print the last `lines` lines of the nodes' logs and return the exit code. follow: print new lines of all nodes
    too.
    """
    store = ClusterStore(name)
    state = store.load()
    if state is not None:
        places = launcher_of(state).logs(state)
    elif store.logs.is_dir():
        folders = sorted(store.logs.iterdir())
        places = [LogPlace(node=path.name, folder="", host=Host(""), keep=str(path)) for path in folders]
    else:
        raise NoSuchCluster(not_up(name))
    if node is not None:
        names = [place.node for place in places]
        if node not in names:
            hint = did_you_mean(node, names) or f"; there are {', '.join(names)}"
            raise NoSuchCluster(f"{name} has no node {node}{hint}")
        places = [place for place in places if place.node == node]
    running: list[subprocess.Popen[str]] = []
    try:
        for place in places:
            request = {"folder": place.folder, "keep": place.keep, "cluster": name, "node": place.node, "lines": lines}
            # The kept logs of a cluster that is down do not grow.
            running.append(place.host.follow("logs.run", {**request, "follow": follow and state is not None}))
            if not follow:
                # One node after the other, so that their lines do not mix.
                running[-1].wait()
        return max((process.wait() for process in running), default=0)
    finally:
        for process in running:
            end(process)
