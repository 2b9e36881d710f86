"""Interface of a kind of cluster (local, ssh, slurm, kubernetes), and a cluster's status.

A kind is a row of `_KINDS` and a class. The code of `up`, `down`, `status` and `logs` names no kind.
"""

import importlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.cluster.hosts import Host
from rlctl.cluster.state import ClusterNode, ClusterState, ClusterStore
from rlctl.config.cluster_schema import ClusterConfig
from rlctl.utils.ray_token import token_environment

# Function (sign, text) that reports progress. The sign is ok, bad, warning or doing.
Say = Callable[[str, str], None]
_KINDS = {
    "local": "rlctl.cluster.machines.launcher:MachineLauncher",
    "ssh": "rlctl.cluster.machines.launcher:MachineLauncher",
    "slurm": "rlctl.cluster.slurm.launcher:SlurmLauncher",
    "kubernetes": "rlctl.cluster.kubernetes.launcher:KubernetesLauncher",
}


@dataclass(frozen=True)
class LogPlace:
    """Location of a node's logs."""

    node: str
    # Folder of the logs on `host` while the node runs.
    folder: str
    host: Host
    # Folder of the logs after the node has ended; None: in the user's home on `host`.
    keep: str | None


@dataclass
class NodeStatus:
    """Current status of a node."""

    node: ClusterNode
    # True if the node's first process runs.
    alive: bool = False
    # Reason why its host could not be asked; empty if it was asked.
    unreachable: str = ""
    # Facts about its host, from `look` of `remote_scripts/node.py`.
    facts: dict[str, Any] = field(default_factory=dict)
    in_ray: bool = False
    # Name -> amount of the resources that Ray has on the node: total, and free.
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """One of unreachable, gone, not joined, up."""
        if self.unreachable:
            return "unreachable"
        if not self.alive:
            return "gone"
        return "up" if self.in_ray else "not joined"


@dataclass
class ClusterStatus:
    """Current status of a cluster."""

    # Status of each node, the head first.
    nodes: list[NodeStatus]
    # Problems and risks, one line each.
    warnings: list[str]
    # Runs that are active on the cluster, as returned by `runs` of `jobs/head_agent.py`.
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def head_alive(self) -> bool:
        return self.nodes[0].alive

    @property
    def condition(self) -> str:
        """One of `up`, `partly up` (nodes are missing), or the head's condition `unreachable` or `gone`."""
        if not self.head_alive:
            return self.nodes[0].condition
        return "up" if all(node.condition == "up" for node in self.nodes) else "partly up"


class Launcher(ABC):
    """Operations on a kind of cluster. Every method may raise ClusterError."""

    def __init__(self, store: ClusterStore, say: Say) -> None:
        self._store = store
        self._say = say

    @abstractmethod
    def prepare(self, config: Any) -> tuple[ClusterState, list[str]]:
        """Check everything that can be checked before a start. Return the state of the new cluster, and warnings."""

    @abstractmethod
    def start(self, config: Any, state: ClusterState) -> list[str]:
        """Start the prepared cluster, and save each change of its state to the file. Return warnings."""

    @abstractmethod
    def dry_run(self, config: Any, job: str | None) -> str:
        """Return the text that would be submitted, and write nothing. job: rlctl command that the cluster would run."""

    @abstractmethod
    def status(self, state: ClusterState) -> ClusterStatus:
        """Return the cluster's current status, without its runs."""

    @abstractmethod
    def quick_condition(self, state: ClusterState) -> str:
        """Return the condition of a started cluster, without asking its nodes on other machines."""

    def repair(self, config: Any, state: ClusterState, status: ClusterStatus) -> list[str]:
        """Restart the nodes that a cluster has lost, and return their names. Other nodes are not touched.

        The default does nothing: it is for schedulers that replace nodes themselves (Kubernetes), or never (Slurm).
        """
        return []

    @abstractmethod
    def stop(self, state: ClusterState) -> list[str]:
        """End the cluster. Return the names of nodes or jobs that could not be ended; `state` then has only these."""

    @abstractmethod
    def logs(self, state: ClusterState) -> list[LogPlace]:
        """Return the locations of the nodes' logs."""

    def environment(self, state: ClusterState) -> dict[str, str]:
        """Return the environment variables with which a Ray program on this machine reaches the cluster."""
        self._store.check_token(state)
        variables = token_environment(self._store.token_path)
        if state.dashboard:
            variables["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{state.dashboard}"
        return variables

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        """Return the command that makes the dashboard available on this machine, with a description; None without a
        dashboard.
        """
        if not state.dashboard:
            return None
        forward = f"{state.dashboard}:127.0.0.1:{state.dashboard}"
        command = f"ssh -N -L {forward} {shlex.join([*state.ssh_options, state.head.host])}"
        return command, f"the dashboard, at http://127.0.0.1:{state.dashboard}"


def launcher_of(cluster: ClusterConfig | ClusterState, say: Say = lambda *_: None) -> Launcher:
    """Return the launcher of a cluster's kind."""
    module, _, name = _KINDS[cluster.kind].partition(":")
    launcher: Launcher = getattr(importlib.import_module(module), name)(ClusterStore(str(cluster.name)), say)
    return launcher
