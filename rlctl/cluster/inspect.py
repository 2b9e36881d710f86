"""What Ray and each host say of a cluster, side by side."""

from typing import Any

from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import ClusterStatus, NodeStatus
from rlctl.cluster.requirements import warnings
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore

_LOOK_S, _RAY_S = 40.0, 5.0
# Where `up` brings lost nodes back.
_BACK = dict.fromkeys(("local", "ssh"), "start anew, beside the rest, by the same rlctl cluster up")


def look_at_hosts(store: ClusterStore, state: ClusterState) -> ClusterStatus:
    """Ask all hosts and Ray at the same time. Raises ClusterError where the token is not the cluster's."""
    store.check_token(state)
    nodes = sorted(state.nodes, key=lambda node: not node.head)
    asked = [(state.host_of(node), "look", _request(node)) for node in nodes]
    if state.address:
        asked.append((state.host_of(state.head), "query", _query(state)))
    asking = HostCalls(asked, _LOOK_S)
    try:
        answers = asking.in_order()
    except BaseException:
        asking.cancel()
        raise
    seen = [_seen(node, answer) for node, answer in zip(nodes, answers)]
    said = answers[len(nodes)] if state.address else None
    if isinstance(said, dict) and said["refused"]:
        raise ClusterError(f"wrong token: {state.address} is not this cluster, or was started anew by another")
    if isinstance(said, dict):
        add_resources(seen, said["nodes"])
    return ClusterStatus(seen, _warnings(state, seen, said))


def _seen(node: ClusterNode, answer: dict[str, Any] | HostError) -> NodeStatus:
    if isinstance(answer, HostError):
        return NodeStatus(node, unreachable=str(answer))
    return NodeStatus(node, alive=answer["alive"], facts=answer)


def add_resources(seen: list[NodeStatus], known: list[dict[str, Any]], by: str = "name") -> None:
    """What Ray says of each node, found by its name, or by its address."""
    living = {each[by]: each for each in known if each["alive"]}
    for each in seen:
        if entry := living.get(getattr(each.node, by)):
            each.in_ray, each.total, each.free = True, entry["total"], entry["free"]


def _warnings(state: ClusterState, seen: list[NodeStatus], said: Any) -> list[str]:
    found = [f"{each.node.name}: {each.unreachable}" for each in seen if each.unreachable]
    gone = [each.node.name for each in seen if not each.unreachable and not each.alive]
    if state.head.name in gone:
        found.append(f"head gone: killed, or the machine was restarted; clear up: rlctl cluster down {state.name}")
    elif gone:
        found.append(f"gone: {', '.join(gone)}; {_BACK.get(state.kind, f'rlctl cluster down {state.name}, then up')}")
    elif isinstance(said, HostError):
        found.append(f"Ray at {state.address} does not answer: {said}")
    found += warnings({each.node.name: each.facts for each in seen if each.facts})
    if state.listen_on_all:
        found.append("listens on all interfaces (listen_on_all): only the token keeps others out")
    return found


def _request(node: ClusterNode) -> dict[str, Any]:
    return {"folder": node.folder, "pid": node.pid, "create_time": node.create_time}


def _query(state: ClusterState) -> dict[str, Any]:
    return {
        "address": state.address,
        "token_path": f"{state.head.folder}/token",
        "environment": state.environment,
        "timeout_s": _RAY_S,
    }
