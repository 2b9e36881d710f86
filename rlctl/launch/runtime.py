"""Runtime of a run: this machine with a private Ray, or a running cluster.

Both yield an `Allocation`: devices reserved for this run, and the data needed to start processes there.
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
from rlctl.launch.worker_imports import preload_workers
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
from rlctl.workers.preloading import ForkServer
from rlctl.workers.reaper import leftovers, sweep

if TYPE_CHECKING:
    from rlctl.launch.session import Session
    from rlctl.workers.nodes import LiveNode, NodeLease, NodeRequest, Reservation

_RESERVE_S = 120.0  # for Ray to reserve devices that it reports as free
_POLL_S = 3.0  # between two attempts, while a run waits for free devices


class Runtime(Protocol):
    """Machine or cluster on which a run starts its processes."""

    def refuse(self, run: RunDir) -> None:
        """Raise RunDirError for a run that must not be continued on this runtime."""
        ...

    def slots(self, session: "Session", resources: ResourceRequest) -> AbstractContextManager["HeldSlots"]:
        """Reserve devices for the processes until the block is left. This must be fast: it starts no Ray on this
        machine.
        """
        ...

    def allocation(self, session: "Session", held_slots: "HeldSlots") -> AbstractContextManager["Allocation"]:
        """Prepare the reserved devices for processes until the block is left."""
        ...


@dataclass(frozen=True)
class HeldSlots:
    """Devices that are reserved for a run."""

    placement: Placement
    # Bytes of the smallest GPU; None without GPUs.
    memory: int | None
    # Ray's reservation on a cluster; None on this machine.
    reservation: "Reservation | None" = None
    # Server that forks the workers; None if they start as usual.
    forks: ForkServer | None = None

    @property
    def machine(self) -> RunMachine:
        """Devices for which the run is settled."""
        return RunMachine(self.placement.device, self.memory, self.placement.ranks_by_node)


@dataclass(frozen=True)
class Allocation:
    """Reserved devices of a run, with its nodes.

    nodes: for each node index of the placement, its lease; None for this machine. folder: function (prefix, root) that
    creates a folder on the first used node. The folder is removed with the allocation.
    """

    placement: Placement
    nodes: "list[NodeLease | None]"
    folder: Callable[[str, str | None], str]

    def node(self, slot: PlacementSlot) -> "NodeLease | None":
        """Return the lease of a slot's node; None for this machine."""
        return self.nodes[slot.node]

    def devices(self, slot: PlacementSlot) -> list[str]:
        """Return the GPUs of a slot in the form of CUDA_VISIBLE_DEVICES."""
        return self._gpu_names(slot, slot.devices)

    def peer_devices(self, slot: PlacementSlot) -> list[str]:
        """Return the GPUs of `Placement.peer_devices` in the form of CUDA_VISIBLE_DEVICES."""
        return self._gpu_names(slot, self.placement.peer_devices(slot))

    def environment(self, slot: PlacementSlot) -> dict[str, str]:
        """Return the environment variables that make a process in the slot reachable from other nodes."""
        node = self.node(slot)
        return node.environment if node else {}

    def cores(self, slot: PlacementSlot) -> int:
        """Return the number of usable CPUs of the slot's machine."""
        node = self.node(slot)
        return node.cores if node else usable_cores()

    def meeting_point(self) -> str:
        """Return the host:port at which trainer ranks form their process group: a free port on rank 0's node."""
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
    """`Runtime` of this machine, with a private Ray that ends with the driver."""

    def refuse(self, run: RunDir) -> None:
        """Refuse a run that belongs to a cluster, see `Runtime.refuse`.

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
        """Choose devices. Raises PlacementError, with the arithmetic, if there are too few."""
        placement = place(this_machine(count_gpus()), resources)
        memory = device_memory() if placement.device == "cuda" else None
        config = session.config
        engine = session.settled.sampling.config.generation.engine.name if session.settled.sampling else None
        with preload_workers(placement, config.trainer.backend, engine, session.logs) as forks:
            yield HeldSlots(placement, memory, forks=forks)
            lost_stages = ", ".join(forks.lost_stages()) if forks else ""
            if lost_stages:
                text = f"the server that forks workers lost {lost_stages}, and workers started slower"
                session.events.emit("warning", what=f"{text}: {session.logs}/imports.log")

    @contextmanager
    def allocation(self, session: "Session", held_slots: HeldSlots) -> Iterator[Allocation]:
        """Start a private Ray."""
        from rlctl.launch.local_ray import local_ray

        with ExitStack() as stack:
            forget_old_code()
            # If a driver and its reaper were both killed, their folders are left.
            for leftover in leftovers():
                sweep([leftover.path])
                session.events.emit("warning", what=f"removed what a killed run left: {leftover}")
            with session.starting("ray"):
                deadline_s = session.config.run.deadline_s
                reaper = stack.enter_context(local_ray(session.logs, session.lose, deadline_s, held_slots.forks))

            def make_folder(prefix: str, root: str | None) -> str:
                return str(stack.enter_context(reaper.folder(prefix, root)))

            yield Allocation(held_slots.placement, [None], make_folder)


class ClusterRuntime:
    """`Runtime` of the cluster in RAY_ADDRESS. wait: wait for free devices at the first attempt too, not only at a
    restart.
    """

    def __init__(self, wait: bool) -> None:
        self._wait = wait
        # Number of nodes of the last attempt; 0: no attempt yet.
        self._num_nodes = 0

    def refuse(self, run: RunDir) -> None:
        """Refuse nothing: the command that submitted the job has checked the run."""

    @contextmanager
    def slots(self, session: "Session", resources: ResourceRequest) -> Iterator[HeldSlots]:
        """Connect to the cluster's Ray and reserve devices.

        If there are too few free devices, raises PlacementError with the arithmetic, or waits and raises TimeoutError
        after `placement.wait_s`.
        """
        from rlctl.launch.local_ray import ray_session, watch_node
        from rlctl.workers.errors import NoEngineLeft, WorkerDied, WorkerTimeout

        with ExitStack() as stack:
            connection = stack.enter_context(ray_session(session.logs, address="auto"))
            stack.enter_context(watch_node(connection, session.lose, session.give_up))
            placement, reservation = self._reserve(session, resources)
            self._num_nodes = len(placement.used_nodes)
            stack.callback(reservation.release)
            memory = min((node.memory for node in reservation.nodes if node.memory), default=None)
            try:
                yield HeldSlots(placement, memory, reservation)
            except (WorkerDied, WorkerTimeout, NoEngineLeft):
                # The reservation is released after this block: until then its devices count as free.
                session.smaller = self._smaller(resources, reservation.requests)
                raise

    @contextmanager
    def allocation(self, session: "Session", held_slots: HeldSlots) -> Iterator[Allocation]:
        """Yield the reserved nodes. Raises PlacementError unless all nodes see the run's files."""
        assert held_slots.reservation
        placement = held_slots.placement
        leases = held_slots.reservation.nodes
        model = Path(session.config.model.path)
        other_nodes = [node for node in leases if not node.is_the_drivers]
        must_share(other_nodes, session.run_dir.path.resolve(), model if model.is_dir() else None)
        if len(placement.used_nodes) > 1:
            # The driver's log is on the head.
            node_names = {**placement.node_by_process, "driver": placement.nodes[0]}
            write_whole(session.logs / NODES, json.dumps(node_names))
        lease_by_index = dict(zip(placement.used_nodes, leases))
        nodes = [lease_by_index.get(index) for index in range(len(placement.nodes))]
        # The folder for weights in transit is on the first node with processes of the run. The driver may be on another
        # node.
        yield Allocation(placement, nodes, leases[0].folder)

    def _smaller(self, resources: ResourceRequest, shares: "Sequence[NodeRequest]" = ()) -> list[ResourceRequest]:
        """Return the sizes of the run that fit the remaining nodes, the largest first; the full size too if it fits.

        shares: devices that the run still holds; they count as free.
        """
        from rlctl.workers.nodes import live_nodes

        nodes = live_nodes()
        held_room = {share.node.id: {"GPU": float(share.gpus), "CPU": share.cpus} for share in shares}
        rooms = []
        for node in nodes:
            room_back = held_room.get(node.id, {})
            free = {key: node.free.get(key, 0.0) + room_back.get(key, 0.0) for key in ("GPU", "CPU")}
            rooms.append(NodeResources.from_free(node.name, free))
        return list(smaller_runs(rooms, resources, self._num_nodes, _device_of(nodes)))

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
    """Return the device kind of a cluster: cuda if any node has GPUs."""
    return "cuda" if any(node.total.get("GPU") for node in nodes) else "cpu"


def config_of_model(folder: Path) -> Path:
    """Return the config file of a model or adapter folder. Every such folder has one."""
    return folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json")


def must_share(nodes: "Sequence[NodeLease]", run: Path, model: Path | None) -> None:
    """Raise PlacementError unless every node sees the run directory and the model's folder under the same paths.

    The ranks write checkpoints and logs there. model: None for a model of the hub.
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
