"""`rlctl cluster down`: ends every node, the head last, and keeps nothing but logs."""

from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import Say, launcher_of
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, NoSuchCluster
from rlctl.config.errors import did_you_mean

_STOP_S = 90.0


def take_down(name: str, say: Say, forget: bool = False) -> ClusterState:
    """Returns what stood. Raises ClusterError while a host could not be cleared; forget: such a host is let go."""
    store = ClusterStore(name)
    if not store.folder.is_dir() or store.load() is None:
        raise NoSuchCluster(not_up(name))
    with store.alone():
        state = store.load()
        if state is None:
            raise NoSuchCluster(not_up(name))
        left = launcher_of(state.kind).stop(store, state, say)
        if left and not forget:
            state.phase = "stopping"
            store.save(state)
            again = f"once they answer, rlctl cluster down {name}; gone for good, --forget"
            raise ClusterError(f"Ray may still run on {', '.join(left)}: {again}")
        store.clear()
    return state


def stop_nodes(store: ClusterStore, state: ClusterState, say: Say, nodes: list[ClusterNode] | None = None) -> list[str]:
    """Ends nodes (None: all), the head after the others. Returns the names of those that could not be cleared."""
    chosen = state.nodes if nodes is None else nodes
    left: list[str] = []
    for wave in ([node for node in chosen if not node.head], [node for node in chosen if node.head]):
        if not wave:
            continue
        say("doing", f"stopping {', '.join(node.name for node in wave)}")
        asking = HostCalls(((state.host_of(node), "stop", _request(store, node)) for node in wave), _STOP_S)
        for index, answer in asking.answers():
            node = wave[index]
            if isinstance(answer, HostError):
                say("bad", f"{node.name}: {answer}")
                left.append(node.name)
            elif answer["left"]:
                pids = ", ".join(map(str, answer["left"]))
                say("bad", f"{node.name}: processes {pids} would not end")
                left.append(node.name)
            elif answer["logs"]:
                say("ok", f"{node.name}: stopped; logs in {answer['logs']}")
    return left


def not_up(name: str) -> str:
    """What to say of a name that no cluster stands under."""
    from rlctl.cluster.state import running_clusters

    names = running_clusters()
    hint = did_you_mean(name, names) or (f"; there are {', '.join(names)}" if names else "")
    return f"no cluster {name} is up{hint}"


def _request(store: ClusterStore, node: ClusterNode) -> dict[str, str | None]:
    # On this machine logs go where the cluster's other files are; elsewhere to the same place of that home.
    keep = None if node.host else str(store.logs / node.name)
    return {"folder": node.folder, "keep": keep, "cluster": store.name, "node": node.name}
