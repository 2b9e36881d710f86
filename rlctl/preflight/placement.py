"""Placement of trainer ranks and engines on nodes and devices, and the refit's transport that follows from it. Pure.

The slots of ranks, or of engines, fill one node before the next (pack) or go round the nodes (spread). An engine's
devices are on one node. Where engines share the trainer's devices on several nodes, each of these has equal shares of
ranks and engines: weights then stay on their node. Devices are counted from 0 among those that a node has free; their
real indices are known once they are reserved.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from rlctl.config.errors import UserError
from rlctl.preflight.backend import backend_of
from rlctl.preflight.machine import Device
from rlctl.preflight.settled import Settled, SettledGrpo

Strategy = Literal["pack", "spread"]
Transport = Literal["shm", "ipc", "broadcast"]
# Processes that share the cores of one machine without GPUs. Its CPUs are not counted, but each costs a gigabyte.
_MOST_ON_CPU = 256


class PlacementError(UserError):
    """A run that does not fit the machine or cluster; the message is one line with the arithmetic."""


@dataclass(frozen=True)
class NodeResources:
    """Free resources of a node."""

    # Empty for this machine alone.
    name: str
    gpus: int
    # None where they are not counted.
    cpus: float | None = None

    @classmethod
    def from_free(cls, name: str, free: Mapping[str, float]) -> "NodeResources":
        """Return those of a node from the free resources that Ray reports."""
        return cls(name, int(free.get("GPU", 0)), free.get("CPU", 0.0))


@dataclass(frozen=True)
class ResourceRequest:
    """Processes to place."""

    ranks: int
    engines: int = 0
    tensor_parallel_size: int = 1
    # True if engines share the trainer's devices.
    colocated: bool = True
    trainer: Strategy = "pack"
    generator: Strategy = "pack"
    # Counts where there is no GPU.
    cpus_per_process: float = 1.0


@dataclass(frozen=True)
class PlacementSlot:
    """Slot of a process. node: index of its node. devices: empty on a CPU."""

    node: int = 0
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Slots of all processes of a run."""

    device: Device
    # By rank.
    trainers: list[PlacementSlot]
    # By engine.
    engines: list[PlacementSlot]
    # True if engines and trainers share devices and take turns; on a CPU they always share the cores.
    shared: bool
    # Names of all nodes, used or not.
    nodes: tuple[str, ...] = ("",)
    cpus_per_process: float = 1.0
    # True on several nodes that have equal shares of ranks and engines each.
    by_node: bool = False

    @property
    def trainer_devices(self) -> int:
        """Devices that train (CPU: a node counts as one device)."""
        return _devices(self.trainers)

    @property
    def generator_devices(self) -> int:
        """Devices that generate."""
        return _devices(self.engines)

    @property
    def all_devices(self) -> int:
        """Distinct devices in use."""
        return _devices([*self.trainers, *self.engines])

    @property
    def used(self) -> list[int]:
        """Indices of the nodes that have processes."""
        return sorted({slot.node for slot in (*self.trainers, *self.engines)})

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Trainer ranks of each node that has any, in the order of the ranks."""
        counts = [self.processes_on(node)[0] for node in self.used]
        return tuple(count for count in counts if count)

    @property
    def node_by_process(self) -> dict[str, str]:
        """Name of the node of each process: trainer-N, engine-N."""
        sides = {"trainer": self.trainers, "engine": self.engines}
        return {f"{side}-{n}": self.nodes[slot.node] for side, slots in sides.items() for n, slot in enumerate(slots)}

    def processes_on(self, node: int) -> tuple[int, int]:
        """Return the numbers of ranks and of engines on a node."""
        return sum(slot.node == node for slot in self.trainers), sum(slot.node == node for slot in self.engines)

    def peer_devices(self, slot: PlacementSlot) -> tuple[int, ...]:
        """Return the devices of the slot's node that trainer ranks have and the slot does not."""
        there = {index for other in self.trainers if other.node == slot.node for index in other.devices}
        return tuple(sorted(there - set(slot.devices)))

    def gpus_on(self, node: int) -> int:
        """Return the number of GPUs to reserve on a node."""
        slots = (*self.trainers, *self.engines)
        return len({index for slot in slots if slot.node == node for index in slot.devices})

    def cpus_on(self, node: int) -> float:
        """Return the number of CPUs to reserve on a node; none where GPUs are."""
        return 0.0 if self.device == "cuda" else self.cpus_per_process * sum(self.processes_on(node))


def place(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device | None = None) -> Placement:
    """Return a slot for every process. device None: cuda where there are GPUs.

    Raises PlacementError with the arithmetic when there is too little room.
    """
    device = device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    most = [node.gpus for node in nodes]
    if device == "cpu":
        each = resources.cpus_per_process
        most = [_MOST_ON_CPU if node.cpus is None else int(node.cpus / each + 1e-6) for node in nodes]
    free = [list(range(count)) for count in most]
    names = tuple(node.name for node in nodes)
    shared = resources.colocated and device == "cuda"
    if device == "cuda" and resources.engines and _enough(most, resources):
        _require_on_a_node(nodes, resources.tensor_parallel_size)
    if resources.colocated and resources.engines:
        found = _equal_shares(free, resources, device)
        if found and len({slot.node for slot in found[0]}) > 1:
            return Placement(device, *found, True, names, resources.cpus_per_process, by_node=True)
        if found and shared:
            free = [slots if node == found[0][0].node else [] for node, slots in enumerate(free)]
        elif shared and _enough(most, resources):
            raise PlacementError(_unequal(nodes, resources))
    # `_take` removes from its list. Without shared devices, engines take from the same list as the ranks, on purpose.
    others = [list(slots) for slots in free] if shared else free
    trainers = _take(free, resources.ranks, 1, resources.trainer)
    size = resources.tensor_parallel_size if device == "cuda" else 1
    engines = _take(others, resources.engines, size, resources.generator) if trainers is not None else None
    if trainers is None or engines is None:
        raise PlacementError(_too_little(nodes, resources, device))
    # Ranks of a node are consecutive, also where they were spread.
    trainers.sort(key=lambda slot: slot.node)
    if device == "cpu":
        trainers, engines = ([PlacementSlot(slot.node) for slot in slots] for slots in (trainers, engines))
    return Placement(device, trainers, engines, shared or device == "cpu", names, resources.cpus_per_process)


def smaller_runs(
    nodes: Sequence[NodeResources], resources: ResourceRequest, parts: int, device: Device
) -> Iterator[ResourceRequest]:
    """Yield the run, if it has room, and then its shares that have room, the largest first.

    parts: number of nodes of the whole run. A share has the ranks and engines of fewer nodes, at least one of each.
    """
    for count in range(parts, 0, -1):
        ranks, engines = (max(1, each * count // parts) for each in (resources.ranks, resources.engines))
        share = replace(resources, ranks=ranks, engines=engines if resources.engines else 0)
        with suppress(PlacementError):
            place(nodes, share, device)
            yield share


def resources(settled: Settled) -> ResourceRequest:
    """Return the processes of a run to place."""
    config, sampling = settled.config, settled.sampling
    trainer, each = config.placement.trainer, config.placement.cpus_per_process
    if sampling is None:
        return ResourceRequest(config.trainer.num_ranks, trainer=trainer, cpus_per_process=each)
    generation = sampling.config.generation
    sizes = (config.trainer.num_ranks, generation.num_engines, generation.tensor_parallel_size)
    return ResourceRequest(*sizes, sampling.colocated, trainer, sampling.config.placement.generator, each)


def this_machine(gpus: int) -> list[NodeResources]:
    """Return the one node of a run without a cluster."""
    return [NodeResources("", gpus)]


def stays_on_nodes(settled: Settled, placement: Placement) -> bool:
    """Return True if on each of several nodes the trainer's ranks bring the engines there all weights.

    Raises PlacementError where engines share GPUs with ranks that hold a part of the weights alone.
    """
    if not placement.by_node:
        return False
    there, copy = placement.ranks_by_node[0], backend_of(settled.trainer).ranks_a_copy(settled.trainer)
    if there % copy and placement.device == "cuda":
        what = f"engines share GPUs with ranks of {len(placement.used)} nodes, but a node's {there} ranks hold a part"
        why = f"of the weights alone: {copy} ranks share a copy"
        raise PlacementError(f"{what} {why}; placement.colocated=false, or trainer.replicas={len(placement.used)}")
    return there % copy == 0


def transport_of(settled: SettledGrpo, placement: Placement) -> Transport:
    """Return `refit.transport` with `auto` resolved. Raises PlacementError for one that does not leave a node."""
    given, stays = settled.config.refit.transport, stays_on_nodes(settled, placement)
    if len(placement.used) > 1 and not stays and given not in ("auto", "broadcast"):
        nodes = ", ".join(placement.nodes[node] for node in placement.used)
        raise PlacementError(f"refit.transport={given} stays on a node, the run is on {nodes}: broadcast, or auto")
    return usual_transport(placement, settled.config.generation.num_engines, stays) if given == "auto" else given


def refit_way(settled: SettledGrpo, placement: Placement) -> str:
    """Return the way of weights to engines, with its reason, for a reader. Raises the errors of `transport_of`."""
    kind, count = transport_of(settled, placement), len(placement.used)
    if count == 1:
        return kind
    if kind != "broadcast":
        there = placement.ranks_by_node[0]
        whose = "whose rank holds" if there == 1 else f"whose {there} ranks hold"
        return f"{kind} within each of {count} nodes, {whose} all weights"
    return f"{kind} between {count} nodes"


def usual_transport(placement: Placement, engines: int, stays: bool = False) -> Transport:
    """Return the transport that `auto` means.

    On CPU the mapping of shared memory is the only copy. Several engines that read the trainers' memory share its
    link (2 ranks to 2 engines on H200s: 62.3 ms, by broadcast 48.4), and one engine gets the parts of several ranks
    sooner by broadcast too (from 3 ranks 44.8 ms, reading 46.9; both while engines saw no other devices). Two NCCL
    ranks cannot share a device. Other nodes have neither this one's memory nor its GPUs, so that a run on several
    broadcasts. It needs not where weights stay on their node (stays).
    """
    if len(placement.used) > 1 and not stays:
        return "broadcast"
    if placement.device == "cpu":
        return "shm"
    return "ipc" if placement.shared or engines == len(placement.trainers) == 1 else "broadcast"


def _equal_shares(
    free: list[list[int]], resources: ResourceRequest, device: Device
) -> tuple[list[PlacementSlot], list[PlacementSlot]] | None:
    """Return slots of ranks and engines on nodes with equal shares of both: few nodes (pack), or many (spread).

    None if no number of nodes divides both and has room.
    """
    ranks, engines = resources.ranks, resources.engines
    size = resources.tensor_parallel_size if device == "cuda" else 1
    counts = [count for count in range(1, len(free) + 1) if not ranks % count and not engines % count]
    for count in reversed(counts) if resources.trainer == "spread" else counts:
        trained, sampled = ranks // count, engines // count
        needed = max(trained, sampled * size) if device == "cuda" else trained + sampled
        nodes = [node for node, slots in enumerate(free) if len(slots) >= needed][:count]
        if len(nodes) < count:
            continue
        if device == "cpu":
            return [PlacementSlot(n) for n in nodes for _ in range(trained)], [
                PlacementSlot(n) for n in nodes for _ in range(sampled)
            ]
        return [PlacementSlot(n, (free[n][i],)) for n in nodes for i in range(trained)], [
            PlacementSlot(n, tuple(free[n][i * size : (i + 1) * size])) for n in nodes for i in range(sampled)
        ]
    return None


def _needed(resources: ResourceRequest) -> int:
    """Return the number of GPUs that a run takes."""
    wanted = resources.engines * resources.tensor_parallel_size
    return max(resources.ranks, wanted) if resources.colocated else resources.ranks + wanted


def _enough(gpus: Sequence[int], resources: ResourceRequest) -> bool:
    return sum(gpus) >= _needed(resources)


def _require_on_a_node(nodes: Sequence[NodeResources], size: int) -> None:
    """Raise PlacementError for an engine that would need the GPUs of two nodes."""
    most = max(node.gpus for node in nodes)
    if size > most:
        what = f"generation.tensor_parallel_size={size}: the workers of an engine are processes of one node"
        why = f"and the largest has {most} GPUs: at most {most}; a model that {most} cannot hold needs larger ones"
        raise PlacementError(f"{what}, {why}; {_free(nodes, [node.gpus for node in nodes], 'GPU')}")


def _unequal(nodes: Sequence[NodeResources], resources: ResourceRequest) -> str:
    ranks, engines = f"{resources.ranks} trainer ranks", f"{resources.engines} engines x"
    what = f"{ranks} and {engines} {resources.tensor_parallel_size} share GPUs (placement.colocated), but not in equal"
    return f"{what} parts on nodes with room; {_free(nodes, [node.gpus for node in nodes], 'GPU')}"


def _take(free: list[list[int]], count: int, size: int, strategy: Strategy) -> list[PlacementSlot] | None:
    """Take `count` slots of `size` devices out of `free`. Return None if there are too few."""
    slots: list[PlacementSlot] = []
    taken = [0] * len(free)
    # A node that holds them all keeps a pool together.
    whole = [node for node, slots in enumerate(free) if len(slots) // size >= count]
    filling = whole[:1] or sorted(range(len(free)), key=lambda node: -(len(free[node]) // size))
    for _ in range(count):
        open_nodes = [node for node in filling if len(free[node]) >= size]
        if strategy == "spread":
            open_nodes = sorted((n for n in range(len(free)) if len(free[n]) >= size), key=lambda node: taken[node])
        if not open_nodes:
            return None
        node = open_nodes[0]
        taken[node] += 1
        slots.append(PlacementSlot(node, tuple(free[node][:size])))
        del free[node][:size]
    return slots


def _devices(slots: Sequence[PlacementSlot]) -> int:
    found = {(slot.node, index) for slot in slots for index in slot.devices}
    return max(1, len(found) or len({slot.node for slot in slots}))


def _too_little(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device) -> str:
    ranks = f"{resources.ranks} trainer rank{'s' * (resources.ranks != 1)}"
    if device == "cpu":
        needed, each = resources.ranks + resources.engines, resources.cpus_per_process
        engines = f" and {resources.engines} engine{'s' * (resources.engines != 1)}" * bool(resources.engines)
        if any(node.cpus is None for node in nodes):
            return f"{ranks}{engines}: at most {_MOST_ON_CPU} processes share a machine without GPUs"
        what = f"{needed * each:g} CPUs needed for {ranks}{engines} (placement.cpus_per_process={each:g})"
        return f"{what}; {_free(nodes, [node.cpus or 0 for node in nodes], 'CPU')}"
    needed = _needed(resources)
    how = "shared by" if resources.colocated else "apart for"
    what = f"{needed} GPUs needed, {how} {ranks} and {resources.engines} engines x {resources.tensor_parallel_size}"
    what = f"{what} (tensor_parallel_size); {_free(nodes, [node.gpus for node in nodes], 'GPU')}"
    return f"{what}; an engine's are of one node" if sum(node.gpus for node in nodes) >= needed else what


def _free(nodes: Sequence[NodeResources], amounts: Sequence[float], word: str) -> str:
    if not any(node.name for node in nodes):
        return f"this machine has {sum(amounts):g}"
    listed = ", ".join(f"{node.name} {amount:g}" for node, amount in zip(nodes, amounts))
    return f"the cluster has {sum(amounts):g} {word}s free: {listed}"
