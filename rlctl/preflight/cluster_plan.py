"""Capacity plan of a run on a cluster that is not there yet: `placement.nodes: 32x8` in a dry run. Pure.

Seconds are bytes over the rates below, so they are the least that a machine of this kind needs.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from rlctl.config.schema import RunConfig
from rlctl.preflight.backend import Violation, Violations, layout_of
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.memory import communicator_bytes, copied_bytes, refit_bytes
from rlctl.preflight.placement import NodeResources, Placement, PlacementError, place, resources
from rlctl.preflight.plan import RunPlan, refit_groups, refit_senders
from rlctl.preflight.settled import Settled

# Bytes/s: copies to page-locked memory, and a rank's share of a shared disk.
_TO_HOST, _DISK = 50e9, 2e9
# Bytes/s into a GPU: within a node by NVLink as broadcasts reach it, between nodes by a 400 Gbit/s adapter a GPU.
_WITHIN = "within a node"
_LINKS = {_WITHIN: 200e9, "between nodes, 400 Gbit/s a GPU": 50e9}
# Bytes of a token of a batch as it travels: id, mask, and each column in float32.
_TOKEN, _COLUMN = 5, 4
# Bytes of an H100, as torch counts them.
H100_BYTES = 79 << 30


@dataclass(frozen=True)
class PlannedCluster:
    """A cluster by its size alone."""

    nodes: int
    gpus: int
    # Bytes of a GPU.
    memory: int

    @property
    def resources(self) -> list[NodeResources]:
        """Free resources of each node."""
        width = len(str(self.nodes))
        return [NodeResources(f"node-{number:0{width}}", self.gpus) for number in range(1, self.nodes + 1)]


def planned_cluster(text: str) -> PlannedCluster:
    """Return the cluster of `32x8`, nodes by GPUs, or `32x8x141`, with the GiB of each GPU. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not found:
        raise ValueError(f"must be nodes x GPUs as 32x8, or 32x8x141 with the GiB of a GPU, not {text!r}")
    return PlannedCluster(int(found[1]), int(found[2]), int(found[3]) << 30 if found[3] else H100_BYTES)


def capacity_rows(settled: Settled, plan: RunPlan) -> list[tuple[str, str]]:
    """Return the demands of a run on links, driver, host memory and disk, as rows of its plan."""
    placement = plan.placement
    if placement is None or settled.facts is None:
        return []
    return [*_refit(settled, placement), *_driver(settled, plan), *_checkpoint(settled, plan)]


def _refit(settled: Settled, placement: Placement) -> Iterator[tuple[str, str]]:
    sampling = settled.sampling
    if sampling is None or settled.facts is None:
        return
    devices = sampling.generation.tensor_parallel_size
    each = refit_bytes(settled.facts, sampling.generation_dtype) / devices
    ways = {way: rate for way, rate in _LINKS.items() if way == _WITHIN or len(placement.used) > 1}
    shown = "; ".join(f"{each / rate:.2g} s {way}" for way, rate in ways.items())
    yield "refit, at least", f"{each / 1e9:.3g} GB into each GPU of an engine: {shown}"
    if groups := refit_groups(sampling, placement):
        members = -(-refit_senders(sampling, placement) // groups) + placement.generator_devices
        room = f"{groups * communicator_bytes(len(placement.used)) / 2**30:.1f} GiB"
        yield (
            "communicators",
            f"{groups} on a GPU of an engine, of {members} ranks each: at most {room}, in the forecast",
        )


def _driver(settled: Settled, plan: RunPlan) -> Iterator[tuple[str, str]]:
    tokens = plan.batch.tokens
    if tokens is None:
        return
    shape = layout_of(settled.trainer)
    copies = settled.trainer.num_ranks // shape.data
    columns = len(settled.computed_columns) + 2 * (settled.sampling is not None)
    a_token = _TOKEN + columns * _COLUMN
    text = f"{tokens * a_token * copies / 1e9:.2g} GB a step at most: {a_token} bytes a token"
    yield "from the driver", f"{text}, to {copies} rank{'s' * (copies != 1)} of each of {shape.data} shards"


def _checkpoint(settled: Settled, plan: RunPlan) -> Iterator[tuple[str, str]]:
    assert settled.facts and plan.schedule.checkpoint_bytes
    whole = plan.schedule.checkpoint_bytes
    a_rank = whole / settled.trainer.num_ranks
    yield "checkpoint", f"{whole / 1e9:,.0f} GB, {a_rank / 1e9:.3g} GB a rank; {a_rank / _DISK:.2g} s to write"
    if settled.config.checkpoint.beside_training:
        stop, copied = f"steps stop for {stopped_s(settled, plan):.2g} s", copied_bytes(settled.trainer, settled.facts)
        yield "", f"{stop}; {copied / 2**30:.1f} GiB of host memory a rank hold the copy meanwhile"
    else:
        yield "", "steps stop while it is written (checkpoint.beside_training=false)"


def stopped_s(settled: Settled, plan: RunPlan) -> float:
    """Return the seconds that steps stop for a checkpoint: the copy to host memory, or writing with the export."""
    assert settled.facts
    if settled.config.checkpoint.beside_training:
        return copied_bytes(settled.trainer, settled.facts) / _TO_HOST
    assert plan.schedule.checkpoint_bytes
    return plan.schedule.checkpoint_bytes / settled.trainer.num_ranks / _DISK


def check_nodes(config: RunConfig) -> Violations:
    """Find a size of a cluster that cannot be read."""
    if config.placement.nodes is not None:
        try:
            # A broken value is no text, and says so here.
            planned_cluster(str(config.placement.nodes))
        except ValueError as error:
            yield Violation("placement.nodes", str(error))


def settle_there(settled: Settled, cluster: PlannedCluster) -> Settled:
    """Return a run as it would be on a cluster."""
    there = settled.on(RunMachine("cuda", cluster.memory), settled.facts)
    ranks: tuple[int, ...] = ()
    with suppress(PlacementError):
        ranks = place(cluster.resources, resources(there), "cuda").ranks_by_node
    return settled.on(RunMachine("cuda", cluster.memory, ranks), settled.facts)
