"""Status of a cluster, asked from Ray and from each host."""

from typing import Any

from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import ClusterStatus, NodeStatus
from rlctl.cluster.requirements import warnings
from rlctl.cluster.state import ClusterError, ClusterState

_INSPECT_S = 40.0
_RAY_S = 5.0


def ask_nodes(state: ClusterState) -> ClusterStatus:
    """Ask all hosts and Ray at the same time, and return the status. Raises ClusterError if Ray refuses the token."""
    nodes = state.head_first
    calls = [(state.host_of(node), "node.look", node.process) for node in nodes]
    if state.address:
        calls.append((state.host_of(state.head), "head.query", ray_query(state)))
    with HostCalls(calls, _INSPECT_S) as running:
        answers = dict(running.answers())
    statuses = []
    for index, node in enumerate(nodes):
        answer = answers[index]
        if isinstance(answer, HostError):
            statuses.append(NodeStatus(node, unreachable=str(answer)))
        else:
            statuses.append(NodeStatus(node, alive=answer["alive"], facts=answer))
    # Index of the call to Ray, which comes after the calls for the nodes; a cluster without an address has none.
    ray_answer = answers.get(len(nodes))
    if isinstance(ray_answer, dict):
        if ray_answer["refused"]:
            raise ClusterError(f"wrong token: {state.address} is not this cluster, or was restarted by another")
        add_resources(statuses, ray_answer["nodes"])
    ray_error = ray_answer if isinstance(ray_answer, HostError) else None
    return ClusterStatus(statuses, _status_warnings(state, statuses, ray_error))


def ray_query(state: ClusterState) -> dict[str, Any]:
    """Return the request for `query` of `remote_scripts/head.py`."""
    token_path = f"{state.head.folder}/token"
    return {
        "address": state.address,
        "token_path": token_path,
        "environment": state.environment,
        "timeout_s": _RAY_S,
    }


def add_resources(statuses: list[NodeStatus], ray_nodes: list[dict[str, Any]], key: str = "name") -> None:
    """Add Ray's resources to the status of each node. key: field by which Ray's nodes are matched, name or address."""
    living_nodes = {ray_node[key]: ray_node for ray_node in ray_nodes if ray_node["alive"]}
    for status in statuses:
        ray_node = living_nodes.get(getattr(status.node, key))
        if ray_node is not None:
            status.in_ray = True
            status.total = ray_node["total"]
            status.free = ray_node["free"]


def _status_warnings(state: ClusterState, statuses: list[NodeStatus], ray_error: HostError | None) -> list[str]:
    """Return a line for each problem of the nodes. If nodes are lost, an error of Ray is left out as their effect."""
    lines = [f"{status.node.name}: {status.unreachable}" for status in statuses if status.unreachable]
    gone_names = [status.node.name for status in statuses if status.condition == "gone"]
    if state.head.name in gone_names:
        lines.append(f"head gone: killed, or the machine was restarted; clear up: rlctl cluster down {state.name}")
    elif gone_names:
        remedy = f"rlctl cluster down {state.name}, then up"
        if state.kind in ("local", "ssh"):
            remedy = "the same rlctl cluster up starts them again"
        lines.append(f"gone: {', '.join(gone_names)}; {remedy}")
    elif ray_error:
        lines.append(f"Ray at {state.address} does not answer: {ray_error}")
    lines += warnings({status.node.name: status.facts for status in statuses if status.facts})
    if state.listen_on_all:
        lines.append("listens on all interfaces (listen_on_all): only the token keeps others out")
    return lines
