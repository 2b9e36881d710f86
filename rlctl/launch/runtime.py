"""The place of a run: this machine with a private Ray, or a running cluster.

Both yield an `Allocation`: slots that only this run uses, and the means to start a process in a slot.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Protocol

from rlctl.cluster.remote_scripts.logs import NODES
from rlctl.config.run_weights import ADAPTER_CONFIG, is_adapter
from rlctl.dashboard.state import read_state
from rlctl.preflight.machine import Device, RunMachine
from rlctl.preflight.placement import (
    NodeResources,
    Placement,
    PlacementError,
    PlacementSlot,
    ResourceRequest,
    place,
    smaller_runs,
    this_machine,
)
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError
from rlctl.utils.code_cache import forget_old_code
from rlctl.utils.devices import count_gpus, device_memory, usable_cores, visible_gpus
from rlctl.utils.files import write_whole
from rlctl.workers.reaper import leftovers, sweep

if TYPE_CHECKING:
    from rlctl.launch.session import Session
    from rlctl.workers.nodes import LiveNode, NodeLease, NodeRequest, Reservation

_RESERVE_S = 120.0
_POLL_S = 3.0


class Runtime(Protocol):
    """The place that a run gets its processes from."""

    def refuse(self, run: RunDir) -> None:
        """Raise RunDirError for a run that must not be continued from here."""
        ...

    def slots(self, session: "Session", resources: ResourceRequest) -> AbstractContextManager["HeldSlots"]:
        """Hold slots for the time of the block. Start nothing slow on this machine."""
        ...

    def allocation(self, session: "Session", held_slots: "HeldSlots") -> AbstractContextManager["Allocation"]:
        """Make the slots ready for processes, for the time of the block."""
        ...


@dataclass(frozen=True)
class HeldSlots:
    """Slots that a run has."""

    placement: Placement
    # Bytes of the smallest GPU; None without GPUs.
    memory: int | None
    # On a cluster.
    reservation: "Reservation | None" = None

    @property
    def machine(self) -> RunMachine:
        """Devices to settle the run for."""
        return RunMachine(self.placement.device, self.memory, self.placement.ranks_by_node)


@dataclass(frozen=True)
class Allocation:
    """Slots of a run on its nodes. nodes: the node of each index in the placement; None if there is only this machine.

    folder: function (prefix, root) that makes a folder on the first node in use. It is removed with the allocation.
    """

    placement: Placement
    nodes: "list[NodeLease | None]"
    folder: Callable[[str, str | None], str]

    def node(self, slot: PlacementSlot) -> "NodeLease | None":
        """Return the node of a slot."""
        return self.nodes[slot.node]

    def devices(self, slot: PlacementSlot) -> list[str]:
        """Return the GPUs of a slot, as CUDA_VISIBLE_DEVICES names them."""
        return self._gpu_names(slot, slot.devices)

    def peer_devices(self, slot: PlacementSlot) -> list[str]:
        """Return the GPUs of `Placement.peer_devices`, as CUDA_VISIBLE_DEVICES names them."""
        return self._gpu_names(slot, self.placement.peer_devices(slot))

    def environment(self, slot: PlacementSlot) -> dict[str, str]:
        """Return the variables by which a process in the slot is reached from other nodes."""
        node = self.node(slot)
        return node.environment if node else {}

    def cores(self, slot: PlacementSlot) -> int:
        """Return the number of usable CPUs of the slot's machine."""
        node = self.node(slot)
        return node.cores if node else usable_cores()

    def meeting_point(self) -> str:
        """Return the host:port at which trainer ranks meet: a free port of rank 0's node."""
        from rlctl.utils.ports import LOOPBACK, free_port

        node = self.node(self.placement.trainers[0])
        if node is None:
            return f"{LOOPBACK}:{free_port()}"
        host = f"[{node.address}]" if ":" in node.address else node.address
        return f"{host}:{node.free_port()}"

    def _gpu_names(self, slot: PlacementSlot, devices: tuple[int, ...]) -> list[str]:
        node = self.node(slot)
        gpus = node.gpus if node else visible_gpus()
        return [gpus[index] for index in devices]


class LocalRuntime:
    """This machine, with a private Ray that ends with the driver."""

    def refuse(self, run: RunDir) -> None:
        """Refuse a cluster's run, see `Runtime.refuse`.

        Its driver may be alive on the cluster, where this process cannot see it.
        """
        record = JobRecord.read(run.path)
        if record is None:
            return
        remedy = f"add --cluster {record.cluster}"
        if record.remote:
            raise RunDirError(f"{run.path} is a copy of a run that lives on {record.cluster}: {remedy}")
        if read_state(run.path).status in ("new", "running"):
            raise RunDirError(f"{run.path} is driven by job {record.job}: stop it with `rlctl runs stop`, or {remedy}")

    @contextmanager
    def slots(self, session: "Session", resources: ResourceRequest) -> Iterator[HeldSlots]:
        """Choose devices. Raises PlacementError with the arithmetic for too few."""
        placement = place(this_machine(count_gpus()), resources)
        yield HeldSlots(placement, device_memory() if placement.device == "cuda" else None)

    @contextmanager
    def allocation(self, session: "Session", held_slots: HeldSlots) -> Iterator[Allocation]:
        """Start Ray."""
        from rlctl.launch.local_ray import local_ray

        with ExitStack() as stack:
            forget_old_code()
            # A driver that was killed together with its reaper leaves its folders.
            for leftover in leftovers():
                sweep([leftover.path])
                session.events.emit("warning", what=f"removed what a killed run left: {leftover}")
            with session.starting("ray"):
                reaper = stack.enter_context(local_ray(session.logs, session.lose, session.config.run.deadline_s))

            def make_folder(prefix: str, root: str | None) -> str:
                return str(stack.enter_context(reaper.folder(prefix, root)))

            yield Allocation(held_slots.placement, [None], make_folder)


class ClusterRuntime:
    """The cluster that RAY_ADDRESS of this process names. wait: wait for room at the first attempt, too."""

    def __init__(self, wait: bool) -> None:
        self._wait = wait
        # Nodes of the last attempt; 0: there was none.
        self._parts = 0

    def refuse(self, run: RunDir) -> None:
        """Refuse nothing: the submitter of the job has checked the run."""

    @contextmanager
    def slots(self, session: "Session", resources: ResourceRequest) -> Iterator[HeldSlots]:
        """Connect to Ray and reserve slots.

        Raises PlacementError with the arithmetic if there is too little room and it must not wait, TimeoutError after
        `placement.wait_s`.
        """
        from rlctl.launch.local_ray import ray_session, watch_node
        from rlctl.workers.errors import NoEngineLeft, WorkerDied, WorkerTimeout

        with ExitStack() as stack:
            connection = stack.enter_context(ray_session(session.logs, address="auto"))
            stack.enter_context(watch_node(connection, session.lose, session.give_up))
            placement, reservation = self._reserve(session, resources)
            self._parts = len(placement.used_nodes)
            stack.callback(reservation.release)
            memory = min((node.memory for node in reservation.nodes if node.memory), default=None)
            try:
                yield HeldSlots(placement, memory, reservation)
            except (WorkerDied, WorkerTimeout, NoEngineLeft):
                session.smaller = self._smaller(resources, reservation.shares)
                raise

    @contextmanager
    def allocation(self, session: "Session", held_slots: HeldSlots) -> Iterator[Allocation]:
        """Raise PlacementError unless the nodes share the run's files."""
        assert held_slots.reservation
        placement = held_slots.placement
        leases = held_slots.reservation.nodes
        model = Path(session.config.model.path)
        other_nodes = [node for node in leases if not node.is_the_drivers]
        must_share(other_nodes, session.run_dir.path.resolve(), model if model.is_dir() else None)
        if len(placement.used_nodes) > 1:
            # The driver's own logs are on the head.
            node_names = {**placement.node_by_process, "driver": placement.nodes[0]}
            write_whole(session.logs / NODES, json.dumps(node_names))
        lease_by_index = dict(zip(placement.used_nodes, leases))
        nodes = [lease_by_index.get(index) for index in range(len(placement.nodes))]
        # Weights in transit are on the node of the run's processes, which may be another node than the driver's.
        yield Allocation(placement, nodes, leases[0].folder)

    def _smaller(self, resources: ResourceRequest, shares: "Sequence[NodeRequest]" = ()) -> list[ResourceRequest]:
        """Return the run as it fits the nodes that are left, the largest first. shares: room that the run still holds.

        The whole run comes first if it fits.
        """
        from rlctl.workers.nodes import live_nodes

        nodes = live_nodes()
        held_room = {share.node.id: {"GPU": float(share.gpus), "CPU": share.cpus} for share in shares}
        rooms = []
        for node in nodes:
            room_back = held_room.get(node.id, {})
            free = {key: node.free.get(key, 0.0) + room_back.get(key, 0.0) for key in ("GPU", "CPU")}
            rooms.append(NodeResources.from_free(node.name, free))
        return list(smaller_runs(rooms, resources, self._parts, _device_of(nodes)))

    def _reserve(self, session: "Session", resources: ResourceRequest) -> tuple[Placement, "Reservation"]:
        from rlctl.workers.nodes import NodeRequest, NoRoom, Reservation, live_nodes

        is_patient = self._wait or session.attempts > 1
        deadline = time.monotonic() + session.config.placement.wait_s
        reported_reason = ""
        while True:
            nodes = live_nodes()
            try:
                rooms = [NodeResources.from_free(node.name, node.free) for node in nodes]
                placement = place(rooms, resources, _device_of(nodes))
                shares = [
                    NodeRequest(nodes[index], placement.gpus_on(index), placement.cpus_on(index))
                    for index in placement.used_nodes
                ]
                return placement, Reservation(shares, _RESERVE_S)
            except (PlacementError, NoRoom) as error:
                reason = str(error)
                if not is_patient:
                    raise PlacementError(f"{reason}; --wait waits for it") from None
            if time.monotonic() > deadline:
                session.smaller = self._smaller(resources)
                raise TimeoutError(f"no room within placement.wait_s={session.config.placement.wait_s:g}: {reason}")
            if session.interrupts.is_requested:
                raise KeyboardInterrupt
            if reason != reported_reason:
                reported_reason = reason
                session.events.emit("warning", what=f"waiting for room: {reason}")
            time.sleep(_POLL_S)


def _device_of(nodes: "Sequence[LiveNode]") -> Device:
    """Return the devices that runs of a cluster use: a cluster with GPUs does not train on its CPUs."""
    return "cuda" if any(node.total.get("GPU") for node in nodes) else "cpu"


def config_of_model(folder: Path) -> Path:
    """Return the file that every folder of a model, or of an adapter, has."""
    return folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json")


def must_share(nodes: "Sequence[NodeLease]", run: Path, model: Path | None) -> None:
    """Raise PlacementError unless every node sees the run directory and the model's folder as this process does.

    The ranks themselves write checkpoints and logs. model: None for a model of the hub.
    """
    probe = run / f".shared-{token_hex(4)}"
    text = token_hex(16)
    probe.write_text(text, encoding="utf-8")
    try:
        for node in nodes:
            mend = "put it on a file system that all nodes share, under the same path"
            if node.read_file(str(probe)) != text:
                raise PlacementError(f"run.dir: {run} is not seen from node {node.name}: {mend}")
            if model is not None and node.read_file(str(config_of_model(model))) is None:
                raise PlacementError(f"model.path: {model} is not seen from node {node.name}: {mend}")
    finally:
        probe.unlink(missing_ok=True)
