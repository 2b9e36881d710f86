"""`rlctl cluster status`: what Ray and each host say of a cluster, side by side."""

from dataclasses import dataclass, field
from typing import Any

from rlctl.cluster.fleet.hosts import Asking, HostError
from rlctl.cluster.fleet.judge import warnings
from rlctl.cluster.fleet.state import ClusterError, Node, State, Store, known_clusters
from rlctl.telemetry.process import lives

_LOOK_S, _RAY_S = 40.0, 5.0


@dataclass
class NodeSeen:
    """A node: its processes (alive), what its host has (facts), what Ray gives out there in all and has free.

    unreachable: why its host could not be asked; empty where it was.
    """

    node: Node
    alive: bool = False
    unreachable: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    in_ray: bool = False
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """In a word."""
        if self.unreachable:
            return "unreachable"
        if not self.alive:
            return "gone"
        return "up" if self.in_ray else "not joined"


@dataclass
class Seen:
    """A cluster, the head first. warnings: what is wrong or may go wrong, a line each."""

    nodes: list[NodeSeen]
    warnings: list[str]

    @property
    def head_alive(self) -> bool:
        return self.nodes[0].alive

    @property
    def condition(self) -> str:
        """up; partly up: nodes are missing; unreachable or gone: the head is."""
        if not self.nodes[0].alive:
            return self.nodes[0].condition
        return "up" if all(node.condition == "up" for node in self.nodes) else "partly up"


def look(store: Store, state: State) -> Seen:
    """Ask all hosts and Ray at the same time. Raises ClusterError where the token is not the cluster's."""
    store.check_token(state)
    nodes = sorted(state.nodes, key=lambda node: not node.head)
    asked = [(state.host_of(node), "look", _request(node)) for node in nodes]
    if state.address:
        asked.append((state.host_of(state.head), "query", _query(state)))
    asking = Asking(asked, _LOOK_S)
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
        _add_resources(seen, said["nodes"])
    return Seen(seen, _warnings(state, seen, said))


def _seen(node: Node, answer: dict[str, Any] | HostError) -> NodeSeen:
    if isinstance(answer, HostError):
        return NodeSeen(node, unreachable=str(answer))
    return NodeSeen(node, alive=answer["alive"], facts=answer)


def _add_resources(seen: list[NodeSeen], known: list[dict[str, Any]]) -> None:
    """What Ray says of each node, found by name."""
    living = {each["name"]: each for each in known if each["alive"]}
    for each in seen:
        if entry := living.get(each.node.name):
            each.in_ray, each.total, each.free = True, entry["total"], entry["free"]


def _warnings(state: State, seen: list[NodeSeen], said: Any) -> list[str]:
    found = [f"{each.node.name}: {each.unreachable}" for each in seen if each.unreachable]
    gone = [each.node.name for each in seen if not each.unreachable and not each.alive]
    if state.head.name in gone:
        found.append(f"head gone: killed, or the machine was restarted; clear up: rlctl cluster down {state.name}")
    elif gone:
        found.append(f"gone: {', '.join(gone)}; start anew, beside the rest, by the same rlctl cluster up")
    elif isinstance(said, HostError):
        found.append(f"Ray at {state.address} does not answer: {said}")
    found += warnings({each.node.name: each.facts for each in seen if each.facts})
    if state.listen_on_all:
        found.append("listens on all interfaces (listen_on_all): only the token keeps others out")
    return found


def open_ports(seen: Seen) -> list[str]:
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


def as_dict(state: State, seen: Seen) -> dict[str, Any]:
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
        "nodes": nodes,
    }


def summary(state: State, seen: Seen) -> str:
    """What a cluster has, in a line."""
    up = [each for each in seen.nodes if each.in_ray]
    count = f"{len(up)} of {len(seen.nodes)} nodes" if len(up) < len(seen.nodes) else _plural(len(up), "node")
    amounts = {name: sum(each.total.get(name, 0) for each in up) for name in ("CPU", "GPU")}
    return f"{count}, {', '.join(_plural(amount, name) for name, amount in amounts.items())}, at {state.address}"


def all_clusters() -> list[dict[str, Any]]:
    """Every cluster that stands or has left logs; only processes of this machine are looked at."""
    entries = []
    for name in known_clusters():
        try:
            state = Store(name).load()
        except ClusterError:
            entries.append({"name": name, "kind": "", "condition": "damaged", "nodes": 0, "address": ""})
            continue
        if state is None:
            entries.append({"name": name, "kind": "", "condition": "down", "nodes": 0, "address": ""})
            continue
        fields = {"kind": state.kind, "nodes": len(state.nodes), "address": state.address}
        entries.append({"name": name, "condition": _condition(state), **fields})
    return entries


def environment(store: Store, state: State) -> dict[str, str]:
    """What a Ray program of this machine needs to find the cluster; over ssh it meets the job API alone."""
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(store.token_path)}
    if state.dashboard:
        found["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{state.dashboard}"
    return found if state.kind == "ssh" else {"RAY_ADDRESS": state.address, **found, **state.environment}


def _condition(state: State) -> str:
    if state.phase != "up":
        return "half started" if state.phase == "starting" else "half stopped"
    here = [node for node in state.nodes if not node.host]
    if not here:
        return "up"
    alive = [node for node in here if lives(node.pid, node.create_time, None)]
    return "up" if alive == here else "partly up" if state.head in alive else "gone"


def _plural(amount: float, word: str) -> str:
    return f"{amount:g} {word}{'' if amount == 1 else 's'}"


def _request(node: Node) -> dict[str, Any]:
    return {"folder": node.folder, "pid": node.pid, "create_time": node.create_time}


def _query(state: State) -> dict[str, Any]:
    return {
        "address": state.address,
        "token_path": f"{state.head.folder}/token",
        "environment": state.environment,
        "timeout_s": _RAY_S,
    }
