"""`rlctl cluster up`: checks every host, then starts the head, then the other nodes; or leaves nothing behind.

What stands already is left as it is, but for nodes that are gone: they are started anew. When a required host fails or
Ctrl-C comes, what this call has started is stopped again.
"""

import sys
import time
from dataclasses import asdict, dataclass, field

from rlctl.cluster.fleet.checking import Say, places
from rlctl.cluster.fleet.down import stop_nodes
from rlctl.cluster.fleet.mending import gone_nodes, mend
from rlctl.cluster.fleet.plan import driver_environment, is_loopback
from rlctl.cluster.fleet.signals import stop_signals, unhurried
from rlctl.cluster.fleet.starting import Starter
from rlctl.cluster.fleet.state import ClusterError, Node, State, Store, folder_name
from rlctl.cluster.fleet.status import Seen, look
from rlctl.config.cluster_schema import CLUSTER_KINDS, ClusterConfig, SshCluster


@dataclass
class Started:
    """What `bring_up` leaves. already: it stood before. again: nodes of it that were started anew.

    seen: what Ray says of it.
    """

    state: State
    seen: Seen
    already: bool = False
    again: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bring_up(config: ClusterConfig, say: Say) -> Started:
    """The cluster, standing. Raises ClusterError, with nothing left of what was started."""
    assert config.name is not None
    store = Store(config.name)
    with store.alone(), stop_signals():
        try:
            return _standing(config, store, say) or _begin(config, store, say)
        finally:
            if store.load() is None:
                store.clear()


def _standing(config: ClusterConfig, store: Store, say: Say) -> Started | None:
    """The cluster if it stands already, its lost nodes started anew; what is left of one that does not is cleared."""
    state = store.load()
    if state is None:
        return None
    if state.phase == "up":
        seen = look(store, state)
        if seen.head_alive:
            again = [node.name for node in gone_nodes(seen)]
            if again:
                # As it was started: what this call was given would change nothing of the rest either.
                config = CLUSTER_KINDS[state.kind](**state.config) if state.config else config
                seen = mend(config, store, state, seen, say)
            return Started(state, seen, already=True, again=again, warnings=seen.warnings)
        head = seen.nodes[0]
        if head.unreachable:
            forget = f"gone for good? rlctl cluster down {store.name} --forget"
            what = f"head {head.node.name}: {head.unreachable}; {forget}"
            raise ClusterError(what)
    say("warning", f"{store.name} stood before and its processes are gone or half started: clearing up")
    if left := stop_nodes(store, state, say):
        raise ClusterError(f"{', '.join(left)} could not be cleared; try again: rlctl cluster down {store.name}")
    store.clear()
    return None


def _begin(config: ClusterConfig, store: Store, say: Say) -> Started:
    spots, found = places(config, say)
    token, digest = store.new_token()
    state = _new_state(config, digest)
    state.config = asdict(config)
    state.environment = driver_environment(is_loopback(spots[0].address))
    state.nodes = [
        Node(place.name, place.host, f"{place.root}/{folder_name()}", index == 0, place.address)
        for index, place in enumerate(spots)
    ]
    store.keep_logs_of([node.name for node in state.nodes])
    store.save(state)
    try:
        lacking = Starter(config, store, state, spots, token, say).start()
        state.phase = "up"
        store.save(state)
        seen = look(store, state)
        if not seen.head_alive:
            raise ClusterError(f"head {state.head.name} ended while the others started: see the logs above")
    except BaseException:
        with unhurried():
            say("doing", "stopping what was started")
            if left := stop_nodes(store, state, say):
                say("warning", f"could not stop {', '.join(left)}; try again: rlctl cluster down {store.name}")
            else:
                store.clear()
        raise
    return Started(state, seen, warnings=[*found, *lacking, *seen.warnings])


def _new_state(config: ClusterConfig, digest: str) -> State:
    """A cluster of which nothing runs yet."""
    state = State(str(config.name), config.kind, "starting", sys.executable, digest, config.listen_on_all, time.time())
    if isinstance(config, SshCluster):
        state.python, state.ssh_options = config.python, config.ssh_options
        state.connect_timeout_s = config.connect_timeout_s
    return state
