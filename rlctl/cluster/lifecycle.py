"""`rlctl cluster up` and `down`.

`up` checks every host, then starts the head, then the other nodes; or leaves nothing behind. A cluster that is up is
left as it is, but its lost nodes are started again. When a required host fails or Ctrl-C comes, everything that this
call has started is stopped again. `down` ends every node, the head last, and keeps nothing but logs.
"""

from dataclasses import dataclass, field

from rlctl.cluster.launcher import ClusterStatus, Say, launcher_of
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster, not_up
from rlctl.cluster.status import cluster_status
from rlctl.config.cluster_schema import ClusterConfig
from rlctl.run.interrupts import ignore_signals, stop_signals


@dataclass
class UpResult:
    """A cluster that is up."""

    state: ClusterState
    status: ClusterStatus
    # True if it was up before.
    already: bool = False
    # Names of its nodes that were lost and started again.
    repaired: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bring_up(config: ClusterConfig, say: Say) -> UpResult:
    """Bring a cluster up. Raises ClusterError, with nothing left running."""
    store = ClusterStore(str(config.name))
    with store.hold_lock(), stop_signals():
        try:
            return _repair(config, store, say) or _begin_cluster(config, store, say)
        finally:
            if store.load() is None:
                store.clear()


def dry_run(config: ClusterConfig, job: str | None = None) -> str:
    """Return the text that `bring_up` would submit. job: an rlctl command to bring a cluster up for.

    Raises ClusterError for a kind that submits nothing, or knows no such jobs.
    """
    return launcher_of(config).dry_run(config, job)


def take_down(name: str, say: Say, forget: bool = False) -> ClusterState:
    """Stop a cluster and return its state. Raises ClusterError while a host could not be cleared.

    forget: let such a host go.
    """
    store = ClusterStore(name)
    if not store.folder.is_dir() or store.load() is None:
        raise NoSuchCluster(not_up(name))
    with store.hold_lock():
        state = store.load()
        if state is None:
            raise NoSuchCluster(not_up(name))
        uncleared = launcher_of(state, say).stop(state)
        if uncleared and not forget:
            state.phase = "stopping"
            store.save(state)
            remedy = f"once they answer, rlctl cluster down {name}; gone for good, --forget"
            raise ClusterError(f"Ray may still run on {', '.join(uncleared)}: {remedy}")
        store.clear()
    return state


def _repair(config: ClusterConfig, store: ClusterStore, say: Say) -> UpResult | None:
    """Start the lost nodes of a cluster that is up, and return it; clear the rest of one that is down."""
    state = store.load()
    if state is None:
        return None
    launcher = launcher_of(state, say)
    if state.phase == "up":
        status = cluster_status(state)
        if status.head_alive:
            repaired = launcher.repair(config, state, status)
            status = cluster_status(state) if repaired else status
            return UpResult(state, status, already=True, repaired=repaired, warnings=status.warnings)
        head = status.nodes[0]
        if head.unreachable:
            remedy = f"gone for good? rlctl cluster down {store.name} --forget"
            raise ClusterError(f"head {head.node.name}: {head.unreachable}; {remedy}")
        for warning in status.warnings:
            say("warning", warning)
    say("warning", f"{store.name} was up before and its processes are gone or half started: clearing up")
    if uncleared := launcher.stop(state):
        raise ClusterError(f"{', '.join(uncleared)} could not be cleared; try again: rlctl cluster down {store.name}")
    store.clear()
    return None


def _begin_cluster(config: ClusterConfig, store: ClusterStore, say: Say) -> UpResult:
    launcher = launcher_of(config, say)
    state, warnings = launcher.prepare(config)
    store.save(state)
    try:
        warnings += launcher.start(config, state)
        state.phase = "up"
        store.save(state)
        status = launcher.status(state)
        if not status.head_alive:
            raise ClusterError(f"head {state.head.name} ended while the others started: see the logs above")
    except BaseException:
        with ignore_signals():
            say("doing", "stopping what was started")
            if uncleared := launcher.stop(state):
                say("warning", f"could not stop {', '.join(uncleared)}; try again: rlctl cluster down {store.name}")
            else:
                store.clear()
        raise
    return UpResult(state, status, warnings=[*warnings, *status.warnings])
