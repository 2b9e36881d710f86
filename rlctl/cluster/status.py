"""`rlctl cluster status`: what is seen of a cluster, in words, and of all clusters in a list.

And `rlctl cluster logs`: the ends of every node's logs, live or left behind.
"""

import subprocess
from typing import Any

from rlctl.cluster.down import not_up
from rlctl.cluster.hosts import Host, HostCalls, end
from rlctl.cluster.launcher import ClusterStatus, LogPlace, launcher_of
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster, known_clusters
from rlctl.config.errors import did_you_mean

_RUNS_S = 40.0


def look(store: ClusterStore, state: ClusterState) -> ClusterStatus:
    """The cluster now, and what runs on it. Raises ClusterError where the token is not the cluster's."""
    asking = HostCalls(_about_runs(state), _RUNS_S)
    try:
        seen = launcher_of(state.kind).look(store, state)
        # Not to know what runs is no reason not to tell of the rest.
        seen.runs = [run for _, told in asking.answers() if isinstance(told, dict) for run in told.get("runs", [])]
    finally:
        asking.cancel()
    return seen


def _about_runs(state: ClusterState) -> "list[tuple[Host, str, dict[str, Any]]]":
    if not state.dashboard:
        return []
    request = {"op": "runs", "dashboard": state.dashboard, "token_path": f"{state.head.folder}/token"}
    return [(state.host_of(state.head), "job", request)]


def open_ports(seen: ClusterStatus) -> list[str]:
    """Ports that other machines can reach, a line a node: whatever listens on more than loopback."""
    lines = []
    for each in seen.nodes:
        ports = [
            f"{port} {process}"
            for address, port, process in each.facts.get("listening", [])
            if not (address.startswith("127.") or address == "::1")
        ]
        if ports:
            lines.append(f"{each.node.name}: {', '.join(ports)}")
    return lines


def as_dict(state: ClusterState, seen: ClusterStatus) -> dict[str, Any]:
    """For `--json`."""
    nodes = [
        {
            "name": each.node.name,
            "host": each.node.host,
            "head": each.node.head,
            "address": each.node.address,
            "pid": each.node.pid,
            "condition": each.condition,
            "unreachable": each.unreachable,
            "resources": each.total,
            "free": each.free,
            **each.facts,
        }
        for each in seen.nodes
    ]
    return {
        "name": state.name,
        "kind": state.kind,
        "condition": seen.condition,
        "address": state.address,
        "dashboard_port": state.dashboard or None,
        "created": state.created,
        "warnings": seen.warnings,
        "runs": seen.runs,
        "nodes": nodes,
    }


def summary(state: ClusterState, seen: ClusterStatus) -> str:
    """What a cluster has, in a line."""
    up = [each for each in seen.nodes if each.in_ray]
    count = f"{len(up)} of {len(seen.nodes)} nodes" if len(up) < len(seen.nodes) else _plural(len(up), "node")
    amounts = {name: sum(each.total.get(name, 0) for each in up) for name in ("CPU", "GPU")}
    return f"{count}, {', '.join(_plural(amount, name) for name, amount in amounts.items())}, at {state.address}"


def all_clusters() -> list[dict[str, Any]]:
    """Every cluster that stands or has left logs; no node of another machine is asked."""
    entries = []
    for name in known_clusters():
        try:
            state = ClusterStore(name).load()
        except ClusterError:
            entries.append({"name": name, "kind": "", "condition": "damaged", "nodes": 0, "address": ""})
            continue
        if state is None:
            entries.append({"name": name, "kind": "", "condition": "down", "nodes": 0, "address": ""})
            continue
        fields = {"kind": state.kind, "nodes": len(state.nodes), "address": state.address}
        entries.append({"name": name, "condition": _condition(state), **fields})
    return entries


def show_logs(name: str, node: str | None, follow: bool, lines: int) -> int:
    """Prints them; returns the exit code. Without follow one node after the other, with it all at once."""
    store = ClusterStore(name)
    state = store.load()
    if state is not None:
        places = launcher_of(state.kind).logs(store, state)
    elif store.logs.is_dir():
        places = [LogPlace(path.name, "", Host(""), str(path)) for path in sorted(store.logs.iterdir())]
    else:
        raise NoSuchCluster(not_up(name))
    if node is not None:
        names = [each.node for each in places]
        if node not in names:
            hint = did_you_mean(node, names) or f"; there are {', '.join(names)}"
            raise NoSuchCluster(f"{name} has no node {node}{hint}")
        places = [each for each in places if each.node == node]
    running: list[subprocess.Popen[str]] = []
    try:
        for each in places:
            request = {"folder": each.folder, "keep": each.keep, "cluster": name, "node": each.node, "lines": lines}
            running.append(each.host.follow("logs", {**request, "follow": follow and state is not None}))
            if not follow:
                running[-1].wait()
        return max((process.wait() for process in running), default=0)
    finally:
        for process in running:
            end(process)


def _condition(state: ClusterState) -> str:
    if state.phase != "up":
        return "half started" if state.phase == "starting" else "half stopped"
    return launcher_of(state.kind).glance(state)


def _plural(amount: float, word: str) -> str:
    return f"{amount:g} {word}{'' if amount == 1 else 's'}"
