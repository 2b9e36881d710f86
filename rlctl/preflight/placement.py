"""Placement of trainer ranks and engines on nodes and devices, and the refit transport that follows. Pure.

Ranks, and likewise engines, fill one node before the next (pack) or go round the nodes (spread). An engine's devices
are on one node. If engines share the trainer's devices on several nodes, each node gets equal shares of ranks and
engines, so that weights stay on their node. A device number counts from 0 among the free devices of its node. The real
indices are known once Ray has reserved the devices.
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
# Most processes on one machine without GPUs. Its cores set no limit, but each process needs about a gigabyte.
_MOST_ON_CPU = 256


class PlacementError(UserError):
    """A run does not fit the machine or cluster. The message is one line with the arithmetic."""


@dataclass(frozen=True)
class NodeResources:
    """Free resources of a node."""

    # Empty for a run on this machine alone.
    name: str
    gpus: int
    # None: CPUs are not counted.
    cpus: float | None = None

    @classmethod
    def from_free(cls, name: str, free: Mapping[str, float]) -> "NodeResources":
        """Return the resources of a node from Ray's report of free resources."""
        return cls(name, gpus=int(free.get("GPU", 0)), cpus=free.get("CPU", 0.0))


@dataclass(frozen=True)
class ResourceRequest:
    """Numbers of processes to place, and how."""

    ranks: int
    engines: int = 0
    tensor_parallel_size: int = 1
    # True if engines share the trainer's devices.
    colocated: bool = True
    trainer: Strategy = "pack"
    generator: Strategy = "pack"
    # CPUs per process; used on nodes without GPUs only.
    cpus_per_process: float = 1.0


@dataclass(frozen=True)
class PlacementSlot:
    """Node and devices of one process. node: index into `Placement.nodes`. devices: empty on a CPU."""

    node: int = 0
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Slots of all processes of a run."""

    device: Device
    # Slot of each trainer rank.
    trainers: list[PlacementSlot]
    # Slot of each engine.
    engines: list[PlacementSlot]
    # True if engines and trainers share devices and take turns; on a CPU they always share the cores.
    shared: bool
    # Names of all nodes, used or not.
    nodes: tuple[str, ...] = ("",)
    cpus_per_process: float = 1.0
    # True if the run is on several nodes with equal shares of ranks and engines.
    by_node: bool = False

    @property
    def trainer_devices(self) -> int:
        """Number of devices that train (CPU: a node counts as one device)."""
        return _count_devices(self.trainers)

    @property
    def generator_devices(self) -> int:
        """Number of devices that generate."""
        return _count_devices(self.engines)

    @property
    def all_devices(self) -> int:
        """Number of distinct devices in use."""
        return _count_devices([*self.trainers, *self.engines])

    @property
    def used_nodes(self) -> list[int]:
        """Indices of the nodes that have processes."""
        return sorted({slot.node for slot in self.trainers + self.engines})

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Number of trainer ranks on each node that has any, in the order of the ranks."""
        counts = [self.processes_on(node)[0] for node in self.used_nodes]
        return tuple(count for count in counts if count)

    @property
    def node_by_process(self) -> dict[str, str]:
        """Process name, for example trainer-0 or engine-1 -> name of its node."""
        nodes = {f"trainer-{rank}": self.nodes[slot.node] for rank, slot in enumerate(self.trainers)}
        return nodes | {f"engine-{index}": self.nodes[slot.node] for index, slot in enumerate(self.engines)}

    def processes_on(self, node: int) -> tuple[int, int]:
        """Return the numbers of ranks and of engines on a node."""
        return sum(slot.node == node for slot in self.trainers), sum(slot.node == node for slot in self.engines)

    def peer_devices(self, slot: PlacementSlot) -> tuple[int, ...]:
        """Return the devices of trainer ranks on the slot's node that are not the slot's own."""
        return tuple(sorted(_devices_on(slot.node, self.trainers) - set(slot.devices)))

    def gpus_on(self, node: int) -> int:
        """Return the number of GPUs to reserve on a node."""
        return len(_devices_on(node, self.trainers + self.engines))

    def cpus_on(self, node: int) -> float:
        """Return the number of CPUs to reserve on a node; 0 in a run on GPUs."""
        return 0.0 if self.device == "cuda" else self.cpus_per_process * sum(self.processes_on(node))


def place(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device | None = None) -> Placement:
    """Return a slot for every process. device None: cuda if any node has GPUs.

    Raises PlacementError, with the arithmetic, if the processes do not fit.
    """
    device = device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    slot_counts = [node.gpus for node in nodes]
    if device == "cpu":
        cpus = resources.cpus_per_process
        slot_counts = [_MOST_ON_CPU if node.cpus is None else int(node.cpus / cpus + 1e-6) for node in nodes]
    free_devices = [list(range(count)) for count in slot_counts]
    names = tuple(node.name for node in nodes)
    takes_turns = resources.colocated and device == "cuda"
    has_enough = sum(slot_counts) >= _needed_gpus(resources)
    if device == "cuda" and resources.engines and has_enough:
        _require_on_a_node(nodes, resources.tensor_parallel_size)
    if resources.colocated and resources.engines:
        placement = _place_equal_shares(free_devices, resources, device, names)
        if placement and placement.by_node:
            return placement
        if placement and takes_turns:
            [only_node] = placement.used_nodes
            free_devices = [devices if node == only_node else [] for node, devices in enumerate(free_devices)]
        elif takes_turns and has_enough:
            raise PlacementError(_describe_unequal(nodes, resources))
    # `_take_slots` removes devices from its list. Unless trainer and engines take turns, both calls use the same list
    # on purpose.
    engine_devices = [list(devices) for devices in free_devices] if takes_turns else free_devices
    trainers = _take_slots(free_devices, resources.ranks, size=1, strategy=resources.trainer)
    if trainers is None:
        raise PlacementError(_describe_lack(nodes, resources, device))
    size = resources.tensor_parallel_size if device == "cuda" else 1
    engines = _take_slots(engine_devices, resources.engines, size=size, strategy=resources.generator)
    if engines is None:
        raise PlacementError(_describe_lack(nodes, resources, device))
    # Ranks of a node get consecutive numbers, even if they were spread.
    trainers.sort(key=lambda slot: slot.node)
    if device == "cpu":
        trainers = [PlacementSlot(slot.node) for slot in trainers]
        engines = [PlacementSlot(slot.node) for slot in engines]
    return Placement(
        device=device,
        trainers=trainers,
        engines=engines,
        shared=takes_turns or device == "cpu",
        nodes=names,
        cpus_per_process=resources.cpus_per_process,
    )


def smaller_runs(
    nodes: Sequence[NodeResources], resources: ResourceRequest, parts: int, device: Device
) -> Iterator[ResourceRequest]:
    """Yield the resources of the whole run and of smaller shares, the largest first, as far as they fit.

    parts: number of nodes of the whole run. A share has the ranks and engines of 1 to `parts` - 1 nodes, at least one
    of each.
    """
    for count in range(parts, 0, -1):
        ranks = max(1, resources.ranks * count // parts)
        engines = max(1, resources.engines * count // parts) if resources.engines else 0
        share = replace(resources, ranks=ranks, engines=engines)
        with suppress(PlacementError):
            place(nodes, share, device)
            yield share


def requested_resources(settled: Settled) -> ResourceRequest:
    """Return the processes that a run needs."""
    config = settled.config
    sampling = settled.sampling
    request = ResourceRequest(
        ranks=config.trainer.num_ranks,
        trainer=config.placement.trainer,
        cpus_per_process=config.placement.cpus_per_process,
    )
    if sampling is None:
        return request
    return replace(
        request,
        engines=sampling.config.generation.num_engines,
        tensor_parallel_size=sampling.config.generation.tensor_parallel_size,
        colocated=sampling.is_colocated,
        generator=sampling.config.placement.generator,
    )


def this_machine(gpus: int) -> list[NodeResources]:
    """Return this machine as the only node, for a run without a cluster."""
    return [NodeResources("", gpus)]


def stays_on_nodes(settled: Settled, placement: Placement) -> bool:
    """Return True if the run is on several nodes and each node's ranks hold all weights, so that a refit stays on its
    node.

    Raises PlacementError if engines share GPUs with a node's ranks that hold only a part of the weights.
    """
    if not placement.by_node:
        return False
    node_ranks = placement.ranks_by_node[0]
    copy_ranks = backend_of(settled.trainer).ranks_a_copy(settled.trainer)
    if node_ranks % copy_ranks == 0:
        return True
    if placement.device == "cuda":
        nodes = len(placement.used_nodes)
        problem = f"engines share GPUs with ranks of {nodes} nodes, but a node's {node_ranks} ranks hold a part of the"
        problem = f"{problem} weights alone: {copy_ranks} ranks share a copy"
        raise PlacementError(f"{problem}; placement.colocated=false, or trainer.replicas={nodes}")
    return False


def transport_of(settled: SettledGrpo, placement: Placement) -> Transport:
    """Return `refit.transport` with `auto` resolved. Raises PlacementError for a one-node transport in a run across
    nodes.
    """
    transport = settled.config.refit.transport
    stays = stays_on_nodes(settled, placement)
    if len(placement.used_nodes) > 1 and not stays and transport not in ("auto", "broadcast"):
        nodes = ", ".join(placement.nodes[node] for node in placement.used_nodes)
        raise PlacementError(f"refit.transport={transport} stays on a node, the run is on {nodes}: broadcast, or auto")
    if transport != "auto":
        return transport
    return usual_transport(placement, settled.config.generation.num_engines, stays)


def refit_way(settled: SettledGrpo, placement: Placement) -> str:
    """Return the refit's transport as text for the plan, with its reason. Raises the errors of `transport_of`."""
    transport = transport_of(settled, placement)
    nodes = len(placement.used_nodes)
    if nodes == 1:
        return transport
    if transport != "broadcast":
        node_ranks = placement.ranks_by_node[0]
        holders = "whose rank holds" if node_ranks == 1 else f"whose {node_ranks} ranks hold"
        return f"{transport} within each of {nodes} nodes, {holders} all weights"
    return f"{transport} between {nodes} nodes"


def usual_transport(placement: Placement, engines: int, stays: bool = False) -> Transport:
    """Return the transport for `auto`.

    On a CPU it is `shm`: engines map the trainer's shared memory. On GPUs that trainer and engines share it is `ipc`,
    because two NCCL ranks cannot share a device. On separate GPUs one rank sends to one engine by `ipc`; otherwise
    `broadcast` is faster. Several engines that read a trainer's memory share its link (2 ranks to 2 engines on H200s:
    62.3 ms by ipc, 48.4 by broadcast). One engine that reads the shards of 3 ranks takes 46.9 ms by ipc, 44.8 by
    broadcast; both while engines saw no other devices. A run across nodes needs `broadcast`, unless weights stay on
    their node (`stays`).
    """
    if len(placement.used_nodes) > 1 and not stays:
        return "broadcast"
    if placement.device == "cpu":
        return "shm"
    return "ipc" if placement.shared or engines == len(placement.trainers) == 1 else "broadcast"


def _place_equal_shares(
    free_devices: list[list[int]], resources: ResourceRequest, device: Device, names: tuple[str, ...]
) -> Placement | None:
    """Place a colocated run with equal shares of ranks and engines per node, on few nodes (pack) or many (spread).

    free_devices: free device numbers of each node. Return None if no number of nodes divides both counts and has room.
    """
    size = resources.tensor_parallel_size if device == "cuda" else 1
    counts = [
        count
        for count in range(1, len(free_devices) + 1)
        if resources.ranks % count == 0 and resources.engines % count == 0
    ]
    for count in reversed(counts) if resources.trainer == "spread" else counts:
        node_ranks = resources.ranks // count
        node_engines = resources.engines // count
        needed_devices = max(node_ranks, node_engines * size) if device == "cuda" else node_ranks + node_engines
        nodes = [node for node, devices in enumerate(free_devices) if len(devices) >= needed_devices][:count]
        if len(nodes) < count:
            continue
        trainers: list[PlacementSlot] = []
        engines: list[PlacementSlot] = []
        for node in nodes:
            if device == "cpu":
                trainers += [PlacementSlot(node)] * node_ranks
                engines += [PlacementSlot(node)] * node_engines
            else:
                # Ranks and engines get the same devices, on which they take turns.
                trainers += _cut_slots(node, free_devices[node], node_ranks, size=1)
                engines += _cut_slots(node, free_devices[node], node_engines, size=size)
        return Placement(
            device=device,
            trainers=trainers,
            engines=engines,
            shared=True,
            nodes=names,
            cpus_per_process=resources.cpus_per_process,
            by_node=count > 1,
        )
    return None


def _cut_slots(node: int, devices: list[int], count: int, size: int) -> list[PlacementSlot]:
    return [PlacementSlot(node, tuple(devices[index * size : (index + 1) * size])) for index in range(count)]


def _needed_gpus(resources: ResourceRequest) -> int:
    """Return the number of GPUs that a run needs."""
    engine_gpus = resources.engines * resources.tensor_parallel_size
    return max(resources.ranks, engine_gpus) if resources.colocated else resources.ranks + engine_gpus


def _require_on_a_node(nodes: Sequence[NodeResources], size: int) -> None:
    """Raise PlacementError if no node has enough GPUs for one engine."""
    largest = max(node.gpus for node in nodes)
    if size > largest:
        problem = f"generation.tensor_parallel_size={size}: the workers of an engine are processes of one node"
        limit = f"and the largest has {largest} GPUs: at most {largest}"
        remedy = f"a model that {largest} cannot hold needs larger ones"
        raise PlacementError(f"{problem}, {limit}; {remedy}; {_describe_free_gpus(nodes)}")


def _describe_unequal(nodes: Sequence[NodeResources], resources: ResourceRequest) -> str:
    engines = f"{resources.engines} engines x {resources.tensor_parallel_size}"
    problem = f"{resources.ranks} trainer ranks and {engines} share GPUs (placement.colocated), but not in equal parts"
    return f"{problem} on nodes with room; {_describe_free_gpus(nodes)}"


def _take_slots(free_devices: list[list[int]], count: int, size: int, strategy: Strategy) -> list[PlacementSlot] | None:
    """Remove `count` slots of `size` devices from `free_devices` and return them; None if there are too few."""
    slots: list[PlacementSlot] = []
    all_nodes = range(len(free_devices))
    taken_slots = [0] * len(free_devices)
    # To pack, prefer the first node that holds all slots; else fill the nodes with most room first.
    sufficient = [node for node in all_nodes if len(free_devices[node]) // size >= count]
    packing_order = sufficient[:1] or sorted(all_nodes, key=lambda node: -(len(free_devices[node]) // size))
    for _ in range(count):
        if strategy == "spread":
            order = sorted(all_nodes, key=lambda node: taken_slots[node])
        else:
            order = packing_order
        node = next((node for node in order if len(free_devices[node]) >= size), None)
        if node is None:
            return None
        taken_slots[node] += 1
        slots.append(PlacementSlot(node, tuple(free_devices[node][:size])))
        del free_devices[node][:size]
    return slots


def _devices_on(node: int, slots: Sequence[PlacementSlot]) -> set[int]:
    devices: set[int] = set()
    for slot in slots:
        if slot.node == node:
            devices.update(slot.devices)
    return devices


def _count_devices(slots: Sequence[PlacementSlot]) -> int:
    devices: set[tuple[int, int]] = set()
    for slot in slots:
        devices.update((slot.node, index) for index in slot.devices)
    nodes = {slot.node for slot in slots}
    return max(1, len(devices) or len(nodes))


def _describe_lack(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device) -> str:
    ranks = "1 trainer rank" if resources.ranks == 1 else f"{resources.ranks} trainer ranks"
    if device == "cuda":
        needed_gpus = _needed_gpus(resources)
        sharing = "shared by" if resources.colocated else "apart for"
        engines = f"{resources.engines} engines x {resources.tensor_parallel_size} (tensor_parallel_size)"
        problem = f"{needed_gpus} GPUs needed, {sharing} {ranks} and {engines}; {_describe_free_gpus(nodes)}"
        if sum(node.gpus for node in nodes) >= needed_gpus:
            return f"{problem}; an engine's are of one node"
        return problem
    processes = ranks
    if resources.engines:
        engines = "1 engine" if resources.engines == 1 else f"{resources.engines} engines"
        processes = f"{ranks} and {engines}"
    if any(node.cpus is None for node in nodes):
        return f"{processes}: at most {_MOST_ON_CPU} processes share a machine without GPUs"
    cpus = resources.cpus_per_process
    needed_cpus = (resources.ranks + resources.engines) * cpus
    problem = f"{needed_cpus:g} CPUs needed for {processes} (placement.cpus_per_process={cpus:g})"
    return f"{problem}; {_describe_free(nodes, [node.cpus or 0 for node in nodes], 'CPU')}"


def _describe_free_gpus(nodes: Sequence[NodeResources]) -> str:
    return _describe_free(nodes, [node.gpus for node in nodes], "GPU")


def _describe_free(nodes: Sequence[NodeResources], amounts: Sequence[float], unit: str) -> str:
    if not any(node.name for node in nodes):
        return f"this machine has {sum(amounts):g}"
    node_amounts = ", ".join(f"{node.name} {amount:g}" for node, amount in zip(nodes, amounts))
    return f"the cluster has {sum(amounts):g} {unit}s free: {node_amounts}"
