"""Puts a run's trainer ranks behind a compiled graph, or says why not; and warms them up before the first step."""

import os
import time
from statistics import median

from rlctl.cluster.session import Session
from rlctl.config.schema import CompiledGraphSection
from rlctl.training.client import TrainerClient
from rlctl.training.interface import Loss
from rlctl.workers.graph import GraphUnavailable
from rlctl.workers.group import NOTHING, WorkerGroup

# Channels grow by themselves; a batch of the tiny run fits, a larger one grows them during the warm-up.
_BUFFER_BYTES = 1 << 20
_CALLS = 20


def compile_group(graph: CompiledGraphSection, group: WorkerGroup, session: Session) -> None:
    """From now on lockstep calls go through a graph; with `enabled: true` an impossible one is a warning.

    Raises GraphUnavailable with `enabled: require`.
    """
    warn = session.events.emit
    if graph.overlap_communication:
        what = "batches come from the driver and gradients go through torch.distributed: no edge between accelerators"
        warn("warning", what=f"ray_compiled_graph.overlap_communication has nothing to overlap: {what}")
    cores = os.cpu_count() or 1
    if len(group) + 1 > cores:
        what = f"{len(group)} ranks and the driver share {cores} cores: calls are not much faster than ordinary ones"
        warn("warning", what=f"ray_compiled_graph: {what}")
    ordinary = _milliseconds(group)
    try:
        with session.starting("compiled graph"):
            group.compile(_BUFFER_BYTES)
    except GraphUnavailable as error:
        if graph.enabled == "require":
            raise
        warn("warning", what=f"no compiled graph, ordinary calls do the same: {error}")
        return
    compiled = _milliseconds(group)
    warn("dispatch", what=f"compiled {compiled:.1f} ms a call, ordinary {ordinary:.1f} ms")


def warm_up(graph: CompiledGraphSection, trainer: TrainerClient, longest: int, batch: int, loss: Loss) -> None:
    """A forward pass over a batch of the largest shape: what is compiled, cached or grown at first use is there then.

    longest: tokens of the run's longest sequence; batch: sequences of its steps.
    """
    trainer.warm_up(graph.warmup_gbs or batch, graph.warmup_seq_len or longest, loss)


def _milliseconds(group: WorkerGroup) -> float:
    """Median of a call that does nothing."""
    taken = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        group.call(NOTHING)
        taken.append(time.perf_counter() - began)
    return 1e3 * median(taken)
