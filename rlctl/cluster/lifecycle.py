"""`rlctl cluster up`: checks every host, then starts the head, then the other nodes; or leaves nothing behind.

What stands already is left as it is, but for nodes that are gone: they are started anew. When a required host fails or
Ctrl-C comes, what this call has started is stopped again.
"""

from dataclasses import dataclass, field

from rlctl.cluster.launcher import ClusterStatus, Say, launcher_of
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore
from rlctl.cluster.status import look
from rlctl.config.cluster_schema import ClusterConfig
from rlctl.run.interrupts import stop_signals, unhurried


@dataclass
class Started:
    """What `bring_up` leaves. already: it stood before. again: nodes of it that were started anew.

    seen: what Ray says of it.
    """

    state: ClusterState
    seen: ClusterStatus
    already: bool = False
    again: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bring_up(config: ClusterConfig, say: Say) -> Started:
    """The cluster, standing. Raises ClusterError, with nothing left of what was started."""
    assert config.name is not None
    store = ClusterStore(config.name)
    with store.alone(), stop_signals():
        try:
            return _standing(config, store, say) or _begin(config, store, say)
        finally:
            if store.load() is None:
                store.clear()


def shown(config: ClusterConfig, job: str | None = None) -> str:
    """What `bring_up` would submit; with a job, an rlctl command, what brings a cluster up for it alone.

    Raises ClusterError for a kind that submits nothing, or knows no such jobs.
    """
    return launcher_of(config.kind).dry_run(config, ClusterStore(str(config.name)), job)


def _standing(config: ClusterConfig, store: ClusterStore, say: Say) -> Started | None:
    """The cluster if it stands already, its lost nodes started anew; what is left of one that does not is cleared."""
    state = store.load()
    if state is None:
        return None
    if state.phase == "up":
        seen = look(store, state)
        if seen.head_alive:
            again = launcher_of(state.kind).mend(config, store, state, seen, say)
            seen = look(store, state) if again else seen
            return Started(state, seen, already=True, again=again, warnings=seen.warnings)
        head = seen.nodes[0]
        if head.unreachable:
            forget = f"gone for good? rlctl cluster down {store.name} --forget"
            what = f"head {head.node.name}: {head.unreachable}; {forget}"
            raise ClusterError(what)
        for warning in seen.warnings:
            say("warning", warning)
    say("warning", f"{store.name} stood before and its processes are gone or half started: clearing up")
    if left := launcher_of(state.kind).stop(store, state, say):
        raise ClusterError(f"{', '.join(left)} could not be cleared; try again: rlctl cluster down {store.name}")
    store.clear()
    return None


def _begin(config: ClusterConfig, store: ClusterStore, say: Say) -> Started:
    launcher = launcher_of(config.kind)
    prepared = launcher.prepare(config, store, say)
    state = prepared.state
    store.save(state)
    try:
        lacking = prepared.start()
        state.phase = "up"
        store.save(state)
        seen = launcher.look(store, state)
        if not seen.head_alive:
            raise ClusterError(f"head {state.head.name} ended while the others started: see the logs above")
    except BaseException:
        with unhurried():
            say("doing", "stopping what was started")
            if left := launcher.stop(store, state, say):
                say("warning", f"could not stop {', '.join(left)}; try again: rlctl cluster down {store.name}")
            else:
                store.clear()
        raise
    return Started(state, seen, warnings=[*prepared.warnings, *lacking, *seen.warnings])
