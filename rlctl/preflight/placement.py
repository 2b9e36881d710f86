"""Which node and device each trainer rank and engine stands on. Pure: rooms in, a `Placement` or one clear error out.

A pool's seats fill one node before the next (pack) or go round the nodes (spread); an engine's devices are never of two
nodes. Devices are counted from 0 among those that a node has free: which they are is known once they are reserved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.preflight.resolved import Device, Resolved

Strategy = Literal["pack", "spread"]
# Processes that share the cores of one machine without GPUs: nobody counts its CPUs, but each costs a gigabyte.
_MOST_ON_CPU = 256


class PlacementError(ValueError):
    """A run that the machine or cluster has no place for; the message is one line with the arithmetic."""


@dataclass(frozen=True)
class NodeResources:
    """What a node has free. name: empty for this machine alone. cpus: None where nobody counts them."""

    name: str
    gpus: int
    cpus: float | None = None

    @classmethod
    def of(cls, name: str, free: Mapping[str, float]) -> "NodeResources":
        """A node's, from what Ray says it has free."""
        return cls(name, int(free.get("GPU", 0)), free.get("CPU", 0.0))


@dataclass(frozen=True)
class ResourceRequest:
    """What is to be placed. colocated: engines share the trainer's devices. cpus_per_process: where there is no GPU."""

    ranks: int
    engines: int = 0
    tensor_parallel_size: int = 1
    colocated: bool = True
    trainer: Strategy = "pack"
    generator: Strategy = "pack"
    cpus_per_process: float = 1.0


@dataclass(frozen=True)
class PlacementSlot:
    """Where a process stands. node: index of its room. devices: empty on a CPU."""

    node: int = 0
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """device: "cpu" or "cuda". trainers[r]: of rank r; engines[e]: of engine e. nodes: names of all rooms.

    shared: engines and trainers share devices and take turns; on a CPU they always share the cores.
    """

    device: Device
    trainers: list[PlacementSlot]
    engines: list[PlacementSlot]
    shared: bool
    nodes: tuple[str, ...] = ("",)
    cpus_per_process: float = 1.0

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
        """Indices of the nodes that processes stand on."""
        return sorted({slot.node for slot in (*self.trainers, *self.engines)})

    def standing_on(self, node: int) -> tuple[int, int]:
        """How many ranks and how many engines stand there."""
        return sum(slot.node == node for slot in self.trainers), sum(slot.node == node for slot in self.engines)

    def beside(self, slot: PlacementSlot) -> tuple[int, ...]:
        """Devices of its node that trainer ranks stand on, and it does not."""
        there = {index for other in self.trainers if other.node == slot.node for index in other.devices}
        return tuple(sorted(there - set(slot.devices)))

    def gpus_on(self, node: int) -> int:
        """GPUs that are to be reserved there."""
        slots = (*self.trainers, *self.engines)
        return len({index for slot in slots if slot.node == node for index in slot.devices})

    def cpus_on(self, node: int) -> float:
        """CPUs that are to be reserved there; none where GPUs are."""
        return 0.0 if self.device == "cuda" else self.cpus_per_process * sum(self.standing_on(node))


def place(rooms: Sequence[NodeResources], resources: ResourceRequest, device: Device | None = None) -> Placement:
    """Return a slot for every process. device None: cuda where there are GPUs.

    Raises PlacementError with the arithmetic when there is too little room.
    """
    device = device or ("cuda" if any(room.gpus for room in rooms) else "cpu")
    free = [list(range(_slots(room, resources, device))) for room in rooms]
    shared = resources.colocated and device == "cuda"
    if shared and resources.engines:
        free = _one_node(free, resources, rooms)
    others = [list(slots) for slots in free] if shared else free
    trainers = _take(free, resources.ranks, 1, resources.trainer)
    size = resources.tensor_parallel_size if device == "cuda" else 1
    engines = _take(others, resources.engines, size, resources.generator) if trainers is not None else None
    if trainers is None or engines is None:
        raise PlacementError(_too_little(rooms, resources, device))
    if device == "cpu":
        trainers, engines = (
            [PlacementSlot(slot.node) for slot in trainers],
            [PlacementSlot(slot.node) for slot in engines],
        )
    names = tuple(room.name for room in rooms)
    return Placement(device, trainers, engines, shared or device == "cpu", names, resources.cpus_per_process)


def resources(config: RunConfig) -> ResourceRequest:
    """What a run wants placed."""
    trainer, each = config.placement.trainer, config.placement.cpus_per_process
    if not isinstance(config, GrpoConfig):
        return ResourceRequest(config.trainer.num_ranks, trainer=trainer, cpus_per_process=each)
    generation = config.generation
    sizes = (config.trainer.num_ranks, generation.num_engines, generation.tensor_parallel_size)
    return ResourceRequest(*sizes, Resolved(config).colocated, trainer, config.placement.generator, each)


def this_machine(gpus: int) -> list[NodeResources]:
    """The one room of a run without a cluster."""
    return [NodeResources("", gpus)]


def _slots(room: NodeResources, resources: ResourceRequest, device: Device) -> int:
    if device == "cuda":
        return room.gpus
    return _MOST_ON_CPU if room.cpus is None else int(room.cpus / resources.cpus_per_process + 1e-6)


def _one_node(free: list[list[int]], resources: ResourceRequest, rooms: Sequence[NodeResources]) -> list[list[int]]:
    """What is free on the first node that holds trainer and engines, and nothing elsewhere: what brings weights from a
    GPU to an engine on the same one does not leave the node. Raises PlacementError if there is none."""
    needed = max(resources.ranks, resources.engines * resources.tensor_parallel_size)
    fits = next((node for node, slots in enumerate(free) if len(slots) >= needed), None)
    if fits is not None:
        return [slots if node == fits else [] for node, slots in enumerate(free)]
    if sum(map(len, free)) < needed:
        return free
    what = f"{needed} GPUs of one node needed, where engines share the trainer's (placement.colocated)"
    raise PlacementError(f"{what}; {_free(rooms, [room.gpus for room in rooms], 'GPU')}")


def _take(free: list[list[int]], count: int, size: int, strategy: Strategy) -> list[PlacementSlot] | None:
    """`count` seats of `size` slots, which are free no more; None if there are too few."""
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


def _too_little(rooms: Sequence[NodeResources], resources: ResourceRequest, device: Device) -> str:
    ranks = f"{resources.ranks} trainer rank{'s' * (resources.ranks != 1)}"
    if device == "cpu":
        needed, each = resources.ranks + resources.engines, resources.cpus_per_process
        engines = f" and {resources.engines} engine{'s' * (resources.engines != 1)}" * bool(resources.engines)
        if any(room.cpus is None for room in rooms):
            return f"{ranks}{engines}: at most {_MOST_ON_CPU} processes share a machine without GPUs"
        what = f"{needed * each:g} CPUs needed for {ranks}{engines} (placement.cpus_per_process={each:g})"
        return f"{what}; {_free(rooms, [room.cpus or 0 for room in rooms], 'CPU')}"
    wanted = resources.engines * resources.tensor_parallel_size
    needed = max(resources.ranks, wanted) if resources.colocated else resources.ranks + wanted
    how = "shared by" if resources.colocated else "apart for"
    what = f"{needed} GPUs needed, {how} {ranks} and {resources.engines} engines x {resources.tensor_parallel_size}"
    what = f"{what} (tensor_parallel_size); {_free(rooms, [room.gpus for room in rooms], 'GPU')}"
    return f"{what}; an engine's are of one node" if sum(room.gpus for room in rooms) >= needed else what


def _free(rooms: Sequence[NodeResources], amounts: Sequence[float], word: str) -> str:
    if not any(room.name for room in rooms):
        return f"this machine has {sum(amounts):g}"
    listed = ", ".join(f"{room.name} {amount:g}" for room, amount in zip(rooms, amounts))
    return f"the cluster has {sum(amounts):g} {word}s free: {listed}"
