"""`rlctl cluster up` on a cluster of which nodes are gone: starts those anew and touches nothing else.

A node that does not come back stays in the state, so that `status` shows it and another `up` tries again.
"""

from rlctl.cluster.down import stop_nodes
from rlctl.cluster.launcher import ClusterStatus, Say
from rlctl.cluster.machines.checks import places_again
from rlctl.cluster.machines.nodes import NodeStarter
from rlctl.cluster.ray_start import Place
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, folder_name
from rlctl.config.cluster_schema import LocalCluster, SshCluster
from rlctl.run.interrupts import unhurried


def gone_nodes(seen: ClusterStatus) -> list[ClusterNode]:
    """Nodes that a standing head has lost; a host that does not answer is left alone, what runs there is unknown."""
    if not seen.nodes[0].in_ray:
        return []
    return [each.node for each in seen.nodes[1:] if each.condition in ("gone", "not joined")]


def mend(
    config: LocalCluster | SshCluster, store: ClusterStore, state: ClusterState, seen: ClusterStatus, say: Say
) -> list[str]:
    """Names of the nodes that were lost and are up again. Raises ClusterError if too few came; the rest stands."""
    gone = gone_nodes(seen)
    if not gone:
        return []
    say("warning", f"{_names(gone)} gone: starting anew, the rest stays as it stands")
    try:
        failed = _start(config, store, state, gone, seen.nodes[0].facts["python"], say)
    except BaseException:
        with unhurried():
            say("doing", "stopping what was started; the rest stays")
            stop_nodes(store, state, say, gone)
            _reset(store, state, gone)
        raise
    least = config.min_hosts if isinstance(config, SshCluster) and config.min_hosts else len(state.nodes)
    up = sum(each.condition == "up" for each in seen.nodes) + len(gone) - len(failed)
    if failed and up < least:
        again = f"all they wrote: rlctl cluster logs {store.name}; then again: rlctl cluster up"
        raise ClusterError(f"{_names(failed)} did not come back, the rest stands; {again}")
    return [node.name for node in gone if node not in failed]


def _start(
    config: LocalCluster | SshCluster,
    store: ClusterStore,
    state: ClusterState,
    gone: list[ClusterNode],
    python: str,
    say: Say,
) -> list[ClusterNode]:
    """Returns those that did not come up."""
    stuck = stop_nodes(store, state, say, gone)
    spots = places_again(config, [node for node in gone if node.name not in stuck], python, say)
    fit = [node for node in gone if node.name in spots]
    for node in fit:
        node.folder = f"{spots[node.name].root}/{folder_name()}"
        node.address = spots[node.name].address
    _reset(store, state, fit)
    token = store.token_path.read_text(encoding="utf-8").strip()
    failed = NodeStarter(config, store, state, _listed(spots, fit), token, say).start_nodes(fit)
    stop_nodes(store, state, say, failed)
    _reset(store, state, failed)
    return [node for node in gone if node in failed or node not in fit]


def _reset(store: ClusterStore, state: ClusterState, nodes: list[ClusterNode]) -> None:
    for node in nodes:
        node.pid, node.create_time = 0, 0.0
    store.save(state)


def _listed(spots: dict[str, Place], nodes: list[ClusterNode]) -> list[Place]:
    return [spots[node.name] for node in nodes]


def _names(nodes: list[ClusterNode]) -> str:
    return ", ".join(node.name for node in nodes)
