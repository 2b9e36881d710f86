"""What differs from one kind of cluster to the next, behind one interface.

A kind is a row of `_KINDS` and a class; `up`, `down`, `status` and `logs` know no kind by name.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlctl.cluster.hosts import Host
from rlctl.cluster.state import ClusterNode, ClusterState, ClusterStore

# How a command speaks while it works: (sign, text), the sign one of ok, bad, warning, doing.
Say = Callable[[str, str], None]
_KINDS = {
    "local": "rlctl.cluster.machines.launcher:MachineLauncher",
    "ssh": "rlctl.cluster.machines.launcher:MachineLauncher",
    "slurm": "rlctl.cluster.slurm.launcher:SlurmLauncher",
    "kubernetes": "rlctl.cluster.kubernetes.launcher:KubernetesLauncher",
}


@dataclass
class PreparedCluster:
    """A cluster of which nothing runs yet. start: brings it up and returns warnings, keeping the state's file true."""

    state: ClusterState
    start: Callable[[], list[str]]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LogPlace:
    """Where a node's logs are: below `folder` on `host` while it lives, else in `keep` (None: at home there)."""

    node: str
    folder: str
    host: Host
    keep: str | None


@dataclass
class NodeStatus:
    """A node: its processes (alive), what its host has (facts), what Ray gives out there in all and has free.

    unreachable: why its host could not be asked; empty where it was.
    """

    node: ClusterNode
    alive: bool = False
    unreachable: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    in_ray: bool = False
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """In a word."""
        if self.unreachable:
            return "unreachable"
        if not self.alive:
            return "gone"
        return "up" if self.in_ray else "not joined"


@dataclass
class ClusterStatus:
    """A cluster, the head first. warnings: what is wrong or may go wrong, a line each.

    runs: that work on it now, as `jobs/head.py` tells of them.
    """

    nodes: list[NodeStatus]
    warnings: list[str]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def head_alive(self) -> bool:
        return self.nodes[0].alive

    @property
    def condition(self) -> str:
        """up; partly up: nodes are missing; unreachable or gone: the head is."""
        if not self.nodes[0].alive:
            return self.nodes[0].condition
        return "up" if all(node.condition == "up" for node in self.nodes) else "partly up"


class Launcher(Protocol):
    """A kind of cluster. Every method raises ClusterError for what keeps it from its work."""

    def prepare(self, config: Any, store: ClusterStore, say: Say) -> PreparedCluster:
        """Checks what can be checked before anything is started; writes the token."""

    def dry_run(self, config: Any, store: ClusterStore, job: str | None) -> str:
        """What would be submitted, as it would be; nothing is written. job: an rlctl command that it is all for."""

    def look(self, store: ClusterStore, state: ClusterState) -> ClusterStatus:
        """The cluster now."""

    def glance(self, state: ClusterState) -> str:
        """Its condition in a word, without asking its nodes."""

    def mend(self, config: Any, store: ClusterStore, state: ClusterState, seen: ClusterStatus, say: Say) -> list[str]:
        """Starts nodes anew that a standing cluster has lost, and returns their names; the rest stays as it is."""

    def stop(self, store: ClusterStore, state: ClusterState, say: Say) -> list[str]:
        """Ends all of it and returns the names of what could not be cleared, to which `state` is cut down."""

    def logs(self, store: ClusterStore, state: ClusterState) -> list[LogPlace]:
        """Where the nodes' logs are."""

    def environment(self, store: ClusterStore, state: ClusterState) -> dict[str, str]:
        """What a Ray program of this machine needs in its environment to find the cluster."""

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        """(command, what it does) that opens the dashboard, where there is one."""


def launcher_of(kind: str) -> Launcher:
    """The launcher of a kind."""
    module, _, name = _KINDS[kind].partition(":")
    launcher: Launcher = getattr(importlib.import_module(module), name)()
    return launcher
