"""Capacity plan of a run on a cluster that does not exist yet: `placement.nodes: 32x8` in a dry run. Pure.

Durations are bytes divided by the rates below, so they are lower bounds.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from rlctl.config.schema import RunConfig
from rlctl.preflight.backend import Violation, Violations, layout_of
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.memory import communicator_bytes, copied_bytes, refit_bytes
from rlctl.preflight.placement import NodeResources, Placement, PlacementError, place, requested_resources
from rlctl.preflight.plan import RunPlan, refit_groups, refit_senders
from rlctl.preflight.settled import Settled

# Bytes/s of copies to page-locked memory.
_HOST_RATE = 50e9
# Bytes/s of a rank's share of a shared disk.
_DISK_RATE = 2e9
# Bytes/s into a GPU. Within a node it is the rate of a broadcast over NVLink, between nodes that of one 400 Gbit/s
# adapter for each GPU.
_WITHIN = "within a node"
_LINK_RATES = {_WITHIN: 200e9, "between nodes, 400 Gbit/s a GPU": 50e9}
# Bytes that the driver sends to a rank for each token of a batch: id (4) and mask (1), then 4 for each float32 column.
_TOKEN_BYTES = 5
_COLUMN_BYTES = 4
# Memory of an H100 in bytes, as torch reports it.
H100_BYTES = 79 << 30


@dataclass(frozen=True)
class PlannedCluster:
    """Size of a cluster that may not exist."""

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
    """Return the cluster that `text` describes. Raises ValueError.

    `32x8` is 32 nodes of 8 GPUs. `32x8x141` also has the GiB of a GPU.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not match:
        raise ValueError(f"must be nodes x GPUs as 32x8, or 32x8x141 with the GiB of a GPU, not {text!r}")
    memory = int(match[3]) << 30 if match[3] else H100_BYTES
    return PlannedCluster(nodes=int(match[1]), gpus=int(match[2]), memory=memory)


def capacity_rows(settled: Settled, plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows of the plan: the run's load on links, driver, host memory and disk."""
    placement = plan.placement
    if placement is None or settled.facts is None:
        return []
    rows = list(_refit_rows(settled, placement))
    rows += _driver_rows(settled, plan)
    rows += _checkpoint_rows(settled, plan)
    return rows


def _refit_rows(settled: Settled, placement: Placement) -> Iterator[tuple[str, str]]:
    sampling = settled.sampling
    if sampling is None or settled.facts is None:
        return
    devices = sampling.generation.tensor_parallel_size
    device_bytes = refit_bytes(settled.facts, sampling.generation_dtype) / devices
    nodes = len(placement.used_nodes)
    durations = [
        f"{device_bytes / rate:.2g} s {link}" for link, rate in _LINK_RATES.items() if link == _WITHIN or nodes > 1
    ]
    yield "refit, at least", f"{device_bytes / 1e9:.3g} GB into each GPU of an engine: {'; '.join(durations)}"
    if groups := refit_groups(sampling, placement):
        members = -(-refit_senders(sampling, placement) // groups) + placement.generator_devices
        room = f"{groups * communicator_bytes(nodes) / 2**30:.1f} GiB"
        yield (
            "communicators",
            f"{groups} on a GPU of an engine, of {members} ranks each: at most {room}, in the forecast",
        )


def _driver_rows(settled: Settled, plan: RunPlan) -> Iterator[tuple[str, str]]:
    tokens = plan.batch.tokens
    if tokens is None:
        return
    shards = layout_of(settled.trainer).data
    copies = settled.trainer.num_ranks // shards
    columns = len(settled.computed_columns)
    if settled.sampling is not None:
        # Every rollout has the columns `advantage` and `rollout_log_prob`.
        columns += 2
    token_bytes = _TOKEN_BYTES + columns * _COLUMN_BYTES
    text = f"{tokens * token_bytes * copies / 1e9:.2g} GB a step at most: {token_bytes} bytes a token"
    ranks = "1 rank" if copies == 1 else f"{copies} ranks"
    yield "from the driver", f"{text}, to {ranks} of each of {shards} shards"


def _checkpoint_rows(settled: Settled, plan: RunPlan) -> Iterator[tuple[str, str]]:
    assert settled.facts and plan.schedule.checkpoint_bytes
    all_bytes = plan.schedule.checkpoint_bytes
    rank_bytes = all_bytes / settled.trainer.num_ranks
    writing = f"{rank_bytes / 1e9:.3g} GB a rank; {rank_bytes / _DISK_RATE:.2g} s to write"
    yield "checkpoint", f"{all_bytes / 1e9:,.0f} GB, {writing}"
    if settled.config.checkpoint.beside_training:
        copy_gib = copied_bytes(settled.trainer, settled.facts) / 2**30
        stop = f"steps stop for {stopped_s(settled, plan):.2g} s"
        yield "", f"{stop}; {copy_gib:.1f} GiB of host memory a rank hold the copy meanwhile"
    else:
        yield "", "steps stop while it is written (checkpoint.beside_training=false)"


def stopped_s(settled: Settled, plan: RunPlan) -> float:
    """Return the seconds for which training stops at a checkpoint.

    With `checkpoint.beside_training` that is the copy to host memory, else the writing of checkpoint and export.
    """
    assert settled.facts
    if settled.config.checkpoint.beside_training:
        return copied_bytes(settled.trainer, settled.facts) / _HOST_RATE
    assert plan.schedule.checkpoint_bytes
    return plan.schedule.checkpoint_bytes / settled.trainer.num_ranks / _DISK_RATE


def check_nodes(config: RunConfig) -> Violations:
    """Find a `placement.nodes` that is not like `32x8` or `32x8x141`."""
    if config.placement.nodes is not None:
        try:
            # A broken value raises its own error here, because it has no text.
            planned_cluster(str(config.placement.nodes))
        except ValueError as error:
            yield Violation("placement.nodes", str(error))


def settle_on_cluster(settled: Settled, cluster: PlannedCluster) -> Settled:
    """Return a run with the values of each `auto` that a planned cluster would give."""
    unplaced = settled.settle_on(RunMachine("cuda", cluster.memory), settled.facts)
    ranks: tuple[int, ...] = ()
    with suppress(PlacementError):
        ranks = place(cluster.resources, requested_resources(unplaced), "cuda").ranks_by_node
    return settled.settle_on(RunMachine("cuda", cluster.memory, ranks), settled.facts)
