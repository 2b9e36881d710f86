"""Nodes of a Ray cluster as a run uses them: the living ones, a reservation on them, and a helper process on each.

A reservation is one placement group with a bundle a node: all bundles or none. The helper holds the bundle's GPUs,
since Ray names them to their holder. A run's processes ask Ray for no GPUs and are given their devices, since several
may share one.
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
# Time from the end of a node's processes until Ray lists it as dead: three missed looks, a second apart, and some more.
_NOTICE_S = 8.0
_NODES_LOOK_S = 0.2


@dataclass(frozen=True)
class LiveNode:
    """A living node."""

    id: str
    name: str
    # The node's address in Ray.
    address: str
    # Resources by Ray's names, such as GPU and CPU.
    total: dict[str, float]
    free: dict[str, float]


@lru_cache(maxsize=1)
def _live_node_ids(moment: int) -> frozenset[str]:
    # One call of Ray for all that ask at a moment: a lost engine makes the pool ask about every other one.
    return frozenset(record["NodeID"] for record in ray.nodes() if record["Alive"])


@dataclass(frozen=True)
class NodeRequest:
    """The share of a node that a run asks for."""

    node: LiveNode
    gpus: int
    cpus: float


@dataclass(frozen=True)
class NodeLease:
    """A reserved share of a node."""

    id: str
    name: str
    address: str
    # Network interface of the address.
    interface: str
    # Names of the GPUs, as CUDA_VISIBLE_DEVICES has them.
    gpus: tuple[str, ...]
    cores: int
    # Bytes of the smallest GPU; None without GPUs.
    memory: int | None
    # Ray handle of its `NodeHelper`.
    helper: Any
    # Ray's scheduling strategy that starts an actor there.
    strategy: Any

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which torch and vLLM meet other nodes at this node's address."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "VLLM_HOST_IP": self.address}

    def free_port(self) -> int:
        """Return a port of the node's address that nobody listens on at this moment."""
        return int(self._ask_helper("free_port", self.address))

    def folder(self, prefix: str, root: str | None) -> str:
        """Return a new folder on the node, which is removed with the reservation."""
        return str(self._ask_helper("folder", prefix, root))

    def read_file(self, path: str) -> str | None:
        """Return the text of a small file as the node sees it; None if it cannot be read there."""
        return cast("str | None", self._ask_helper("read_file", path))

    @property
    def is_the_drivers(self) -> bool:
        """True if this process runs on the node."""
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
        """Return True if Ray lists the node as alive, or did 0.2 s ago."""
        return self.id in _live_node_ids(int(time.monotonic() / _NODES_LOOK_S))

    def is_gone(self) -> bool:
        """Return True if the node is gone. If its helper does not answer, wait until Ray has noticed."""
        end = time.monotonic() + _NOTICE_S
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
    """Resources that were free a moment ago are not: another run took them."""


def live_nodes() -> list[LiveNode]:
    """Return the living nodes, the head first, then by name. Two calls a moment apart may differ."""
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
    """Shares of nodes, held until `release`."""

    def __init__(self, shares: Sequence[NodeRequest], deadline_s: float) -> None:
        """Reserve the shares. Raises NoRoom if that takes longer than the deadline."""
        self.shares = shares
        bundles = []
        for share in shares:
            amounts = {"GPU": float(share.gpus), "CPU": share.cpus}
            # Ray wants a bundle to ask for something.
            bundles.append({name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001})
        selectors = [{_ID_LABEL: share.node.id} for share in shares]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        try:
            if not self._group.wait(deadline_s):
                state = placement_group_table(self._group)["stats"]["scheduling_state"]
                raise NoRoom(f"what the run needs could not be reserved within {deadline_s:g} s (Ray says {state})")
            helpers = [
                ray.remote(num_cpus=0, num_gpus=share.gpus)(NodeHelper)
                .options(scheduling_strategy=self._strategy(index))
                .remote()
                for index, share in enumerate(shares)
            ]
            refs = [helper.facts.remote(share.node.address) for helper, share in zip(helpers, shares)]
            facts = ray.get(refs, timeout=deadline_s)
        except (RayActorError, GetTimeoutError) as error:
            remove_placement_group(self._group)
            raise NoRoom(f"a node was lost while it was reserved: {error}") from error
        except BaseException:
            remove_placement_group(self._group)
            raise
        self.nodes: list[NodeLease] = []
        for index, (share, helper, (interface, gpus, cores, memory)) in enumerate(zip(shares, helpers, facts)):
            lease = NodeLease(
                id=share.node.id,
                name=share.node.name,
                address=share.node.address,
                interface=interface,
                gpus=gpus,
                cores=cores,
                memory=memory,
                helper=helper,
                strategy=self._strategy(index),
            )
            self.nodes.append(lease)

    def release(self) -> None:
        """Remove the folders, then give everything back."""
        closing = [node.helper.close.remote() for node in self.nodes]
        ray.wait(closing, num_returns=len(closing), timeout=_NODE_POLL_S)
        for node in self.nodes:
            ray.kill(node.helper)
        remove_placement_group(self._group)

    def _strategy(self, index: int) -> Any:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)


class NodeHelper:
    """The process that answers a `NodeLease` on its node."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._reaper: Any = None

    def facts(self, address: str) -> tuple[str, tuple[str, ...], int, int | None]:
        """Return interface, gpus, cores and memory of the `NodeLease`."""
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
