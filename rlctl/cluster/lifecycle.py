"""`rlctl cluster up` and `down`.

`up` checks every host, then starts the head, then the other nodes. If a required host fails, or at Ctrl-C, it stops
everything that it has started. If the cluster is up already, it only restarts lost nodes. `down` ends every node, the
head last, and keeps only logs.
"""

from dataclasses import dataclass, field

from rlctl.cluster.launcher import ClusterStatus, Say, launcher_of
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster, not_up
from rlctl.cluster.status import cluster_status
from rlctl.config.cluster_schema import ClusterConfig
from rlctl.run.interrupts import ignore_signals, stop_signals


@dataclass
class UpResult:
    """Result of `bring_up`."""

    state: ClusterState
    status: ClusterStatus
    # True if the cluster was up before.
    already: bool = False
    # Names of lost nodes that were restarted.
    repaired: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bring_up(config: ClusterConfig, say: Say) -> UpResult:
    """Bring a cluster up. After a failure stop every node that was started, and raise ClusterError."""
    store = ClusterStore(str(config.name))
    with store.hold_lock(), stop_signals():
        try:
            return _repair(config, store, say) or _begin_cluster(config, store, say)
        finally:
            # No cluster was started: remove the folder and a token, which the check of the hosts may have written.
            if store.load() is None:
                store.clear()


def dry_run(config: ClusterConfig, job: str | None = None) -> str:
    """Return the text that `bring_up` would submit. job: rlctl command that the cluster would run.

    Raises ClusterError for a kind of cluster that submits nothing, or supports no `job`.
    """
    return launcher_of(config).dry_run(config, job)


def take_down(name: str, say: Say, forget: bool = False) -> ClusterState:
    """Stop a cluster and return its state. Raises ClusterError if a node could not be ended.

    forget: ignore such nodes.
    """
    store = ClusterStore(name)
    # Checked before the lock too, because the lock creates the folder of the name.
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
    """Restart the lost nodes of a cluster that is up, and return the result.

    Return None if the cluster must be started: there is none, or its head was gone and the rest is cleared up now.
    """
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
        # A head that does not answer may still run: clearing up would end runs on it.
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
    """Check the hosts and start the cluster. After a failure, or at Ctrl-C, stop the nodes that were started."""
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
