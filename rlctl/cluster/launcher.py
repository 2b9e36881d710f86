"""The interface of each kind of cluster, and its status.

A kind is a row of `_KINDS` and a class; `up`, `down`, `status` and `logs` know no kind by name.
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

# Reports progress: (sign, text), the sign one of ok, bad, warning, doing.
Say = Callable[[str, str], None]
_KINDS = {
    "local": "rlctl.cluster.machines.launcher:MachineLauncher",
    "ssh": "rlctl.cluster.machines.launcher:MachineLauncher",
    "slurm": "rlctl.cluster.slurm.launcher:SlurmLauncher",
    "kubernetes": "rlctl.cluster.kubernetes.launcher:KubernetesLauncher",
}


@dataclass(frozen=True)
class LogPlace:
    """Places of a node's logs."""

    node: str
    # Folder on `host` while the node lives.
    folder: str
    host: Host
    # Folder of the logs that it left; None: at home there.
    keep: str | None


@dataclass
class NodeStatus:
    """A node now."""

    node: ClusterNode
    # True if its first process runs.
    alive: bool = False
    # Why its host could not be asked; empty where it was.
    unreachable: str = ""
    # Facts about its host, from `remote_scripts/node.py`.
    facts: dict[str, Any] = field(default_factory=dict)
    in_ray: bool = False
    # Resources that Ray gives out there, by name: all, and the free ones.
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
    """A cluster now."""

    # The head first.
    nodes: list[NodeStatus]
    # Problems and risks, a line each.
    warnings: list[str]
    # Runs that work on it, as `jobs/head_agent.py` describes them.
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def head_alive(self) -> bool:
        return self.nodes[0].alive

    @property
    def condition(self) -> str:
        """One of up; partly up: nodes are missing; unreachable or gone: the head is."""
        if not self.head_alive:
            return self.nodes[0].condition
        return "up" if all(node.condition == "up" for node in self.nodes) else "partly up"


class Launcher(ABC):
    """A kind of cluster. Every method raises ClusterError."""

    def __init__(self, store: ClusterStore, say: Say) -> None:
        self._store = store
        self._say = say

    @abstractmethod
    def prepare(self, config: Any) -> tuple[ClusterState, list[str]]:
        """Check everything that is known before a start; return the state of the coming cluster, and warnings."""

    @abstractmethod
    def start(self, config: Any, state: ClusterState) -> list[str]:
        """Bring up the prepared cluster, keeping the state's file true; return warnings."""

    @abstractmethod
    def dry_run(self, config: Any, job: str | None) -> str:
        """Return the submission, and write nothing. job: an rlctl command that it is all for."""

    @abstractmethod
    def status(self, state: ClusterState) -> ClusterStatus:
        """Return the cluster's status now, without its runs."""

    @abstractmethod
    def quick_condition(self, state: ClusterState) -> str:
        """Return the condition of a cluster that came up, without asking its nodes."""

    def repair(self, config: Any, state: ClusterState, status: ClusterStatus) -> list[str]:
        """Start the nodes again that a cluster has lost, and return their names; the others are left alone.

        Nothing to do where the scheduler brings nodes back itself, or has given their place away.
        """
        return []

    @abstractmethod
    def stop(self, state: ClusterState) -> list[str]:
        """End the cluster; return the names of nodes or jobs that could not be cleared. `state` keeps these alone."""

    @abstractmethod
    def logs(self, state: ClusterState) -> list[LogPlace]:
        """Return where the nodes' logs are."""

    def environment(self, state: ClusterState) -> dict[str, str]:
        """Return the environment by which a Ray program of this machine finds the cluster."""
        self._store.check_token(state)
        variables = token_environment(self._store.token_path)
        if state.dashboard:
            variables["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{state.dashboard}"
        return variables

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        """Return the command that opens the dashboard on this machine, and its meaning; None where there is none."""
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
