"""Nodes of a Ray cluster: lists living nodes, reserves GPUs and CPUs on nodes, starts a helper on each reserved node.

A reservation is one Ray placement group with one bundle for each node. Ray grants all bundles or none. The helper
process takes the bundle's GPUs, because Ray tells GPU ids only to the process that has them. A run's other processes
ask Ray for no GPUs: rlctl assigns their devices, because several processes may share one.
"""

import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlctl.utils.devices import device_memory, usable_cores
from rlctl.utils.ports import free_port
from rlctl.workers.errors import WorkerDied, WorkerTimeout

_ID_LABEL = "ray.io/node-id"
_NODE_POLL_S = 5.0
_ASK_S = 60.0
# After this time Ray lists a lost node as dead for certain. It needs three missed health checks, one each second.
_NOTICE_S = 8.0
_NODES_LOOK_S = 0.2


@dataclass(frozen=True)
class LiveNode:
    """A living node."""

    id: str
    name: str
    # IP address by which Ray knows the node.
    address: str
    # Amounts of all resources and of the free ones, by Ray's names, such as GPU and CPU.
    total: dict[str, float]
    free: dict[str, float]


@lru_cache(maxsize=1)
def _live_node_ids(moment: int) -> frozenset[str]:
    # moment: the time in units of 0.2 s, so that the result is cached for 0.2 s. After the loss of an engine the pool
    # asks about the node of every other engine.
    return frozenset(record["NodeID"] for record in ray.nodes() if record["Alive"])


@dataclass(frozen=True)
class NodeRequest:
    """GPUs and CPUs that a run requests on one node."""

    node: LiveNode
    gpus: int
    cpus: float


@dataclass(frozen=True)
class NodeLease:
    """GPUs and CPUs that a run has reserved on one node."""

    id: str
    name: str
    address: str
    # Network interface of the address.
    interface: str
    # Names of the GPUs in the form of CUDA_VISIBLE_DEVICES.
    gpus: tuple[str, ...]
    cores: int
    # Bytes of memory of the smallest GPU; None without GPUs.
    memory: int | None
    # Ray handle of the node's `NodeHelper`.
    helper: Any
    # Ray's scheduling strategy that starts an actor within this reservation.
    strategy: Any

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make torch and vLLM use this node's address to connect to other nodes."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "VLLM_HOST_IP": self.address}

    def free_port(self) -> int:
        """Return a port of the node's address on which no process listens now."""
        return int(self._ask_helper("free_port", self.address))

    def folder(self, prefix: str, root: str | None) -> str:
        """Make a folder on the node, and return its path. The folder is removed with the reservation."""
        return str(self._ask_helper("folder", prefix, root))

    def read_file(self, path: str) -> str | None:
        """Return the text of a small file on the node; None if the node cannot read it."""
        return cast("str | None", self._ask_helper("read_file", path))

    @property
    def is_the_drivers(self) -> bool:
        """True if this process, the driver, runs on the node."""
        return bool(ray.get_runtime_context().get_node_id() == self.id)

    def _ask_helper(self, method: str, *arguments: Any) -> Any:
        """Call the helper. Raises WorkerDied, WorkerTimeout."""
        try:
            return ray.get(getattr(self.helper, method).remote(*arguments), timeout=_ASK_S)
        except RayActorError as error:
            raise WorkerDied(method, [f"the helper on {self.name}"], "its process or node is gone") from error
        except GetTimeoutError as error:
            raise WorkerTimeout(method, [f"the helper on {self.name}"], _ASK_S, "nothing") from error

    def lives(self) -> bool:
        """Return True if Ray lists the node as alive, or did so at most 0.2 s ago."""
        return self.id in _live_node_ids(int(time.monotonic() / _NODES_LOOK_S))

    def is_gone(self) -> bool:
        """Return True if the node is gone. If its helper does not answer, wait until Ray has noticed the loss."""
        end = time.monotonic() + _NOTICE_S
        # Ray lists a lost node for some seconds. The node lives if its helper answers, or if Ray lists it until `end`.
        while self.lives():
            if time.monotonic() > end or self._helper_answers():
                return False
            time.sleep(_NODES_LOOK_S)
        return True

    def _helper_answers(self) -> bool:
        try:
            ray.get(self.helper.read_file.remote(""), timeout=1.0)
        except (RayActorError, GetTimeoutError):
            return False
        return True


class NoRoom(RuntimeError):
    """Resources could not be reserved, for example because another run has just taken them."""


def live_nodes() -> list[LiveNode]:
    """Return the living nodes: the head first, the others by name. Nodes may come and go between two calls."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        LiveNode(
            id=record["NodeID"],
            name=record["NodeName"],
            address=record["NodeManagerAddress"],
            total=dict(record["Resources"]),
            free=dict(free.get(record["NodeID"], {})),
        )
        for record in ray.nodes()
        if record["Alive"]
    ]
    return sorted(nodes, key=lambda node: ("node:__internal_head__" not in node.total, node.name))


class Reservation:
    """GPUs and CPUs on one or more nodes, reserved until `release`. `nodes` has one `NodeLease` for each node."""

    def __init__(self, requests: Sequence[NodeRequest], deadline_s: float) -> None:
        """Reserve the requested amounts. Raises NoRoom if Ray does not grant them within `deadline_s` seconds."""
        self.requests = requests
        bundles = []
        for request in requests:
            amounts = {"GPU": float(request.gpus), "CPU": request.cpus}
            # Ray refuses a bundle without any resource.
            bundles.append({name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001})
        selectors = [{_ID_LABEL: request.node.id} for request in requests]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        try:
            if not self._group.wait(deadline_s):
                state = placement_group_table(self._group)["stats"]["scheduling_state"]
                raise NoRoom(f"what the run needs could not be reserved within {deadline_s:g} s (Ray says {state})")
            helpers = [
                ray.remote(num_cpus=0, num_gpus=request.gpus)(NodeHelper)
                .options(scheduling_strategy=self._strategy(index))
                .remote()
                for index, request in enumerate(requests)
            ]
            refs = [helper.facts.remote(request.node.address) for helper, request in zip(helpers, requests)]
            facts = ray.get(refs, timeout=deadline_s)
        except (RayActorError, GetTimeoutError) as error:
            remove_placement_group(self._group)
            raise NoRoom(f"a node was lost while it was reserved: {error}") from error
        except BaseException:
            remove_placement_group(self._group)
            raise
        self.nodes: list[NodeLease] = []
        for index, (request, helper, (interface, gpus, cores, memory)) in enumerate(zip(requests, helpers, facts)):
            lease = NodeLease(
                id=request.node.id,
                name=request.node.name,
                address=request.node.address,
                interface=interface,
                gpus=gpus,
                cores=cores,
                memory=memory,
                helper=helper,
                strategy=self._strategy(index),
            )
            self.nodes.append(lease)

    def release(self) -> None:
        """Remove the folders on the nodes, end the helpers, and free the reserved GPUs and CPUs."""
        closing = [node.helper.close.remote() for node in self.nodes]
        ray.wait(closing, num_returns=len(closing), timeout=_NODE_POLL_S)
        for node in self.nodes:
            ray.kill(node.helper)
        remove_placement_group(self._group)

    def _strategy(self, index: int) -> Any:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)


class NodeHelper:
    """Process on a reserved node that answers the calls of its `NodeLease`."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._reaper: Any = None

    def facts(self, address: str) -> tuple[str, tuple[str, ...], int, int | None]:
        """Return (interface, gpus, cores, memory), the fields of `NodeLease` that only the node itself knows."""
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return _interface(address), gpus, usable_cores(), device_memory() if gpus else None

    def free_port(self, address: str) -> int:
        return free_port(address)

    def read_file(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError:
            return None

    def folder(self, prefix: str, root: str | None) -> str:
        from rlctl.workers.reaper import Reaper

        self._reaper = self._reaper or Reaper()
        path = self._reaper.make(prefix, root)
        self._folders.append(path)
        return str(path)

    def close(self) -> None:
        """Remove the folders."""
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)
        if self._reaper:
            self._reaper.close()


def _interface(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address and entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries):
            return name
    return "lo"
