"""The compiled graph of a run's trainer ranks, or the reason why there is none."""

import time
from statistics import median

from rlctl.config.schema import CompiledGraphSection
from rlctl.launch.session import Session
from rlctl.utils.cores import usable_cores
from rlctl.workers.graph import GraphUnavailable, idle
from rlctl.workers.group import WorkerGroup

# Channels grow by themselves; a batch of the tiny run fits, a larger one grows them during the warm-up.
_BUFFER_BYTES = 1 << 20
_CALLS = 20


def compile_group(graph: CompiledGraphSection, group: WorkerGroup, session: Session) -> None:
    """Send lockstep calls through a graph from now on; with `enabled: true` an impossible graph is a warning.

    Raises GraphUnavailable with `enabled: require`.
    """
    emit = session.events.emit
    if graph.overlap_communication:
        what = "batches come from the driver and gradients go through torch.distributed: no edge between accelerators"
        emit("warning", what=f"ray_compiled_graph.overlap_communication has nothing to overlap: {what}")
    cores = usable_cores()
    if len(group) + 1 > cores:
        what = f"{len(group)} ranks and the driver share {cores} cores: calls are not much faster than ordinary ones"
        emit("warning", what=f"ray_compiled_graph: {what}")

    def lost(why: str) -> None:
        if graph.enabled == "require":
            raise GraphUnavailable(f"the compiled graph broke: {why}")
        emit("warning", what=f"the compiled graph broke, the run goes on with ordinary calls: {why}")

    ordinary = _milliseconds(group)
    try:
        with session.starting("compiled graph"):
            group.compile(_BUFFER_BYTES, lost)
    except GraphUnavailable as error:
        if graph.enabled == "require":
            raise
        emit("warning", what=f"no compiled graph, ordinary calls do the same: {error}")
        return
    compiled = _milliseconds(group)
    emit("dispatch", what=f"compiled {compiled:.1f} ms a call, ordinary {ordinary:.1f} ms")


def _milliseconds(group: WorkerGroup) -> float:
    """Return the median duration of a call that does nothing, in milliseconds."""
    taken = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        group.call(idle)
        taken.append(time.perf_counter() - began)
    return 1e3 * median(taken)
