"""`rlctl cluster up`: checks every host, then starts the head, then the other nodes; or leaves nothing behind.

What stands already is left as it is. When a required host fails, or Ctrl-C comes, what this call has started is
stopped again.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlctl.cluster.fleet.checking import Say, places
from rlctl.cluster.fleet.down import stop_nodes
from rlctl.cluster.fleet.plan import driver_environment, is_loopback
from rlctl.cluster.fleet.starting import Starter
from rlctl.cluster.fleet.state import ClusterError, Node, State, Store, folder_name
from rlctl.cluster.fleet.status import Seen, look
from rlctl.config.cluster_schema import ClusterConfig, SshCluster


@dataclass
class Started:
    """What `bring_up` leaves. already: it stood before. seen: what Ray says of it."""

    state: State
    seen: Seen
    already: bool = False
    warnings: list[str] = field(default_factory=list)


def bring_up(config: ClusterConfig, say: Say) -> Started:
    """The cluster, standing. Raises ClusterError, with nothing left of what was started."""
    assert config.name is not None
    store = Store(config.name)
    with store.alone(), _stop_signals():
        try:
            return _standing(store, say) or _begin(config, store, say)
        finally:
            if store.load() is None:
                store.clear()


def _standing(store: Store, say: Say) -> Started | None:
    """The cluster if it stands already; what is left of one that does not is cleared away."""
    state = store.load()
    if state is None:
        return None
    if state.phase == "up":
        seen = look(store, state)
        if seen.head_alive:
            return Started(state, seen, already=True, warnings=seen.warnings)
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
    state.environment = driver_environment(is_loopback(spots[0].address))
    state.nodes = [
        Node(place.name, place.host, f"{place.root}/{folder_name()}", index == 0, place.address)
        for index, place in enumerate(spots)
    ]
    store.save(state)
    try:
        lacking = Starter(config, store, state, spots, token, say).start()
        state.phase = "up"
        store.save(state)
        seen = look(store, state)
        if not seen.head_alive:
            raise ClusterError(f"head {state.head.name} ended while the others started: see the logs above")
    except BaseException:
        with _unhurried():
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
        state.storage = config.storage.rstrip("/")
    return state


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """A terminal that closes and a `kill` are Ctrl-C: what was started is stopped again."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Clearing up is not interrupted: it takes seconds, and what it leaves nobody would stop."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, handler in before.items():
            signal.signal(number, handler)
