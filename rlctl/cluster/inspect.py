"""Status of a cluster from two sides: from Ray, and from each host."""

from typing import Any

from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import ClusterStatus, NodeStatus
from rlctl.cluster.requirements import warnings
from rlctl.cluster.state import ClusterError, ClusterState

_INSPECT_S, _RAY_S = 40.0, 5.0


def ask_nodes(state: ClusterState) -> ClusterStatus:
    """Ask all hosts and Ray at the same time. Raises ClusterError where the token is not the cluster's."""
    nodes = state.head_first
    calls = [(state.host_of(node), "node.look", node.process) for node in nodes]
    if state.address:
        calls.append((state.host_of(state.head), "head.query", ray_query(state)))
    with HostCalls(calls, _INSPECT_S) as running:
        answers = dict(running.answers())
    seen = []
    for index, node in enumerate(nodes):
        answer = answers[index]
        if isinstance(answer, HostError):
            seen.append(NodeStatus(node, unreachable=str(answer)))
        else:
            seen.append(NodeStatus(node, alive=answer["alive"], facts=answer))
    ray = answers.get(len(nodes))
    if isinstance(ray, dict):
        if ray["refused"]:
            raise ClusterError(f"wrong token: {state.address} is not this cluster, or was restarted by another")
        add_resources(seen, ray["nodes"])
    return ClusterStatus(seen, _warnings(state, seen, ray if isinstance(ray, HostError) else None))


def ray_query(state: ClusterState) -> dict[str, Any]:
    """Return the request of `remote_scripts/head.py`."""
    token_path = f"{state.head.folder}/token"
    return {
        "address": state.address,
        "token_path": token_path,
        "environment": state.environment,
        "timeout_s": _RAY_S,
    }


def add_resources(seen: list[NodeStatus], known: list[dict[str, Any]], by: str = "name") -> None:
    """Note Ray's facts of each node, found by its name or its address."""
    living = {each[by]: each for each in known if each["alive"]}
    for each in seen:
        if entry := living.get(getattr(each.node, by)):
            each.in_ray, each.total, each.free = True, entry["total"], entry["free"]


def _warnings(state: ClusterState, seen: list[NodeStatus], ray_error: HostError | None) -> list[str]:
    found = [f"{each.node.name}: {each.unreachable}" for each in seen if each.unreachable]
    gone = [each.node.name for each in seen if each.condition == "gone"]
    if state.head.name in gone:
        found.append(f"head gone: killed, or the machine was restarted; clear up: rlctl cluster down {state.name}")
    elif gone:
        repairs = state.kind in ("local", "ssh")
        remedy = (
            "the same rlctl cluster up starts them again" if repairs else f"rlctl cluster down {state.name}, then up"
        )
        found.append(f"gone: {', '.join(gone)}; {remedy}")
    elif ray_error:
        found.append(f"Ray at {state.address} does not answer: {ray_error}")
    found += warnings({each.node.name: each.facts for each in seen if each.facts})
    if state.listen_on_all:
        found.append("listens on all interfaces (listen_on_all): only the token keeps others out")
    return found
