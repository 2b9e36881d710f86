"""Slots: the nodes and devices of processes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["pack", "spread"]


@dataclass(frozen=True)
class PlacementSlot:
    """Node and devices of one process. node: index into `Placement.nodes`. devices: empty on a CPU."""

    node: int = 0
    devices: tuple[int, ...] = ()


def cut_slots(node: int, devices: list[int], count: int, size: int) -> list[PlacementSlot]:
    """Return the first `count` slots of `size` devices of a node."""
    return [PlacementSlot(node, tuple(devices[index * size : (index + 1) * size])) for index in range(count)]


def take_slots(free_devices: list[list[int]], count: int, size: int, strategy: Strategy) -> list[PlacementSlot] | None:
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


def devices_on(node: int, slots: Sequence[PlacementSlot]) -> set[int]:
    """Return the devices of these slots on a node."""
    devices: set[int] = set()
    for slot in slots:
        if slot.node == node:
            devices.update(slot.devices)
    return devices


def count_devices(slots: Sequence[PlacementSlot]) -> int:
    """Return the number of distinct devices. On a CPU a node counts as one device."""
    devices: set[tuple[int, int]] = set()
    for slot in slots:
        devices.update((slot.node, index) for index in slot.devices)
    nodes = {slot.node for slot in slots}
    return max(1, len(devices) or len(nodes))
