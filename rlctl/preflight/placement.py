"""Placement of trainer ranks and engines on nodes and devices, and the refit transport that follows. Pure.

Ranks, and likewise engines, fill one node before the next (pack) or go round the nodes (spread). An engine's devices
are on one node. If engines share the trainer's devices on several nodes, each node gets equal shares of ranks and
engines, so that weights stay on their node. A device number counts from 0 among the free devices of its node. The real
indices are known once Ray has reserved the devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from rlctl.config.errors import UserError
from rlctl.preflight.backend import backend_of
from rlctl.preflight.machine import Device
from rlctl.preflight.roles import scoring_roles
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.preflight.slots import PlacementSlot as PlacementSlot
from rlctl.preflight.slots import Strategy, count_devices, cut_slots, devices_on, take_slots

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
    # Number of GPUs of each engine that scores with a frozen model. They share no GPU.
    scoring: tuple[int, ...] = ()


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
    # Slot of each engine that scores with a frozen model, in the order of `ResourceRequest.scoring`.
    scoring: tuple[PlacementSlot, ...] = ()

    @property
    def slots(self) -> list[PlacementSlot]:
        """Slots of all processes."""
        return self.trainers + self.engines + list(self.scoring)

    @property
    def trainer_devices(self) -> int:
        """Number of devices that train (CPU: a node counts as one device)."""
        return count_devices(self.trainers)

    @property
    def generator_devices(self) -> int:
        """Number of devices that generate."""
        return count_devices(self.engines)

    @property
    def all_devices(self) -> int:
        """Number of distinct devices in use."""
        return count_devices(self.slots)

    @property
    def used_nodes(self) -> list[int]:
        """Indices of the nodes that have processes."""
        return sorted({slot.node for slot in self.slots})

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Number of trainer ranks on each node that has any, in the order of the ranks."""
        counts = [self.processes_on(node)[0] for node in self.used_nodes]
        return tuple(count for count in counts if count)

    @property
    def node_by_process(self) -> dict[str, str]:
        """Process name, for example trainer-0 or engine-1 -> name of its node."""
        nodes = {f"trainer-{rank}": self.nodes[slot.node] for rank, slot in enumerate(self.trainers)}
        # A rank of a critic is beside the trainer's of the same number.
        nodes |= {f"critic-{rank}": self.nodes[slot.node] for rank, slot in enumerate(self.trainers)}
        return nodes | {f"engine-{index}": self.nodes[slot.node] for index, slot in enumerate(self.engines)}

    def processes_on(self, node: int) -> tuple[int, int]:
        """Return the numbers of ranks and of engines on a node."""
        return sum(slot.node == node for slot in self.trainers), sum(slot.node == node for slot in self.engines)

    def peer_devices(self, slot: PlacementSlot) -> tuple[int, ...]:
        """Return the devices of trainer ranks on the slot's node that are not the slot's own."""
        return tuple(sorted(devices_on(slot.node, self.trainers) - set(slot.devices)))

    def gpus_on(self, node: int) -> int:
        """Return the number of GPUs to reserve on a node."""
        return len(devices_on(node, self.slots))

    def cpus_on(self, node: int) -> float:
        """Return the number of CPUs to reserve on a node; 0 in a run on GPUs."""
        if self.device == "cuda":
            return 0.0
        scoring = sum(slot.node == node for slot in self.scoring)
        return self.cpus_per_process * (sum(self.processes_on(node)) + scoring)


def place(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device | None = None) -> Placement:
    """Return a slot for every process. device None: cuda if any node has GPUs.

    Raises PlacementError, with the arithmetic, if the processes do not fit.
    """
    device = device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    placement = _place_run(nodes, resources, device)
    if not resources.scoring:
        return placement
    return replace(placement, scoring=_place_scoring(nodes, resources, placement))


def _place_scoring(
    nodes: Sequence[NodeResources], resources: ResourceRequest, placement: Placement
) -> tuple[PlacementSlot, ...]:
    """Return slots of the engines that score, on devices that the run does not use otherwise."""
    is_cpu = placement.device == "cpu"
    free_devices = []
    for index, node in enumerate(nodes):
        taken = devices_on(index, placement.trainers + placement.engines)
        count = node.gpus
        if is_cpu:
            count = _cpu_processes(node, resources.cpus_per_process) - sum(placement.processes_on(index))
        free_devices.append([device for device in range(count) if device not in taken])
    slots: list[PlacementSlot] = []
    for size in resources.scoring:
        taken_slots = take_slots(free_devices, 1, size=1 if is_cpu else size, strategy="pack")
        if taken_slots is None:
            needed = f"{len(resources.scoring)} CPUs" if is_cpu else f"{sum(resources.scoring)} GPUs"
            room = _describe_free_gpus(nodes)
            problem = f"{needed} needed for engines that score with a model, besides those of the run"
            raise PlacementError(f"{problem}; {room}; place=swapped or resident needs none")
        slots += [PlacementSlot(slot.node) for slot in taken_slots] if is_cpu else taken_slots
    return tuple(slots)


def _cpu_processes(node: NodeResources, cpus_per_process: float) -> int:
    """Return how many processes a node without GPUs has CPUs for."""
    return _MOST_ON_CPU if node.cpus is None else int(node.cpus / cpus_per_process + 1e-6)


def _place_run(nodes: Sequence[NodeResources], resources: ResourceRequest, device: Device) -> Placement:
    """Return a slot for every rank and every engine that samples."""
    slot_counts = [node.gpus for node in nodes]
    if device == "cpu":
        slot_counts = [_cpu_processes(node, resources.cpus_per_process) for node in nodes]
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
            # One node holds all processes: the slots below are taken from its devices.
            [only_node] = placement.used_nodes
            free_devices = [devices if node == only_node else [] for node, devices in enumerate(free_devices)]
        elif takes_turns and has_enough:
            raise PlacementError(_describe_unequal(nodes, resources))
    # `take_slots` removes devices from its list. Unless trainer and engines take turns, both calls use the same list
    # on purpose.
    engine_devices = [list(devices) for devices in free_devices] if takes_turns else free_devices
    trainers = take_slots(free_devices, resources.ranks, size=1, strategy=resources.trainer)
    if trainers is None:
        raise PlacementError(_describe_lack(nodes, resources, device))
    size = resources.tensor_parallel_size if device == "cuda" else 1
    engines = take_slots(engine_devices, resources.engines, size=size, strategy=resources.generator)
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
    roles = scoring_roles(settled.grpo.config) if settled.grpo else ()
    return replace(
        request,
        engines=sampling.config.generation.num_engines,
        tensor_parallel_size=sampling.config.generation.tensor_parallel_size,
        colocated=sampling.is_colocated,
        generator=sampling.config.placement.generator,
        scoring=tuple(chain.from_iterable([role.tensor_parallel_size] * role.num_engines for role in roles)),
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
                trainers += cut_slots(node, free_devices[node], node_ranks, size=1)
                engines += cut_slots(node, free_devices[node], node_engines, size=size)
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
