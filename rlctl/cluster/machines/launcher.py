"""Clusters of machines that exist already, this one or others over ssh."""

import sys
import time
from dataclasses import asdict

from rlctl.cluster.inspect import ask_nodes
from rlctl.cluster.launcher import ClusterStatus, Launcher, LogPlace
from rlctl.cluster.machines.checks import places, places_again
from rlctl.cluster.machines.node_starter import NodeStarter, stop_nodes
from rlctl.cluster.ray_start import NO_DASHBOARD, Place, is_loopback
from rlctl.cluster.remote_scripts.node import lives
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, node_folder_name
from rlctl.config.cluster_schema import CLUSTER_KINDS, LocalCluster, SshCluster
from rlctl.run.interrupts import unhurried
from rlctl.workers import LOOPBACK_ONLY

MachineCluster = LocalCluster | SshCluster


class MachineLauncher(Launcher):
    """The kinds `local` and `ssh`."""

    def prepare(self, config: MachineCluster) -> tuple[ClusterState, list[str]]:
        self._places, warnings = places(config, self._say)
        digest = self._store.new_token()
        state = ClusterState(
            self._store.name, config.kind, "starting", sys.executable, digest, config.listen_on_all, time.time()
        )
        if isinstance(config, SshCluster):
            state.python, state.ssh_options = config.python, config.ssh_options
            state.connect_timeout_s = config.connect_timeout_s
            state.storage = config.storage.rstrip("/")
        state.config = asdict(config)
        state.environment = dict(LOOPBACK_ONLY) if is_loopback(self._places[0].address) else {}
        state.nodes = [
            ClusterNode(place.name, place.host, f"{place.root}/{node_folder_name()}", index == 0, place.address)
            for index, place in enumerate(self._places)
        ]
        self._store.keep_logs_of([node.name for node in state.nodes])
        return state, warnings

    def start(self, config: MachineCluster, state: ClusterState) -> list[str]:
        """Bring up the head, then the other nodes at the same time.

        Nodes that failed, and could be spared, leave the state.
        """
        logs = f"nothing is left running; all it wrote: rlctl cluster logs {state.name}"
        starter = self._starter(config, state, self._places)
        if starter.start([state.head]):
            raise ClusterError(f"the head did not start, {logs}")
        warnings = [] if self._places[0].dashboard else [NO_DASHBOARD.format(where="head")]
        failed = starter.start([node for node in state.nodes if not node.head])
        if not failed:
            return warnings
        if len(state.nodes) - len(failed) < _fewest(config, state):
            raise ClusterError(f"{_node_names(failed)} did not start, {logs}")
        stop_nodes(self._store, state, self._say, failed)
        state.nodes = [node for node in state.nodes if node not in failed]
        return [*warnings, f"going on without {_node_names(failed)} (min_hosts)"]

    def dry_run(self, config: MachineCluster, job: str | None) -> str:
        raise ClusterError(f"--dry-run shows what is submitted, and {config.kind} submits nothing: leave it out")

    def status(self, state: ClusterState) -> ClusterStatus:
        self._store.check_token(state)
        return ask_nodes(state)

    def quick_condition(self, state: ClusterState) -> str:
        # Other machines are not asked.
        here = [node for node in state.nodes if not node.host]
        alive = [node for node in here if lives(node.process)]
        return "up" if alive == here else "partly up" if state.head in alive else "gone"

    def repair(self, config: MachineCluster, state: ClusterState, status: ClusterStatus) -> list[str]:
        """Start the nodes again that the cluster has lost, and return their names. Raises ClusterError if too few came.

        A host that does not answer is left alone: its processes are unknown. A node that does not come back stays in
        the state: `status` shows it, and another `up` tries again.
        """
        # As it was started: a config given to `up` now would not change the other nodes either.
        config = CLUSTER_KINDS[state.kind](**state.config) if state.config else config
        lost = [each.node for each in status.nodes[1:] if each.condition in ("gone", "not joined")]
        if not lost or not status.nodes[0].in_ray:
            return []
        self._say("warning", f"{_node_names(lost)} gone: starting again, the other nodes are left as they are")
        try:
            failed = self._start_again(config, state, lost, python=status.nodes[0].facts["python"])
        except BaseException:
            with unhurried():
                self._say("doing", "stopping what was started; the other nodes stay")
                stop_nodes(self._store, state, self._say, lost)
                self._forget_processes(state, lost)
            raise
        up = sum(each.condition == "up" for each in status.nodes) + len(lost) - len(failed)
        if failed and up < _fewest(config, state):
            again = f"all they wrote: rlctl cluster logs {state.name}; then again: rlctl cluster up"
            raise ClusterError(f"{_node_names(failed)} did not come back, the other nodes stay up; {again}")
        return [node.name for node in lost if node not in failed]

    def stop(self, state: ClusterState) -> list[str]:
        left = stop_nodes(self._store, state, self._say, state.nodes)
        if left:
            state.nodes = [node for node in state.nodes if node.name in left]
            if not any(node.head for node in state.nodes):
                state.nodes[0].head = True
        return left

    def logs(self, state: ClusterState) -> list[LogPlace]:
        kept = self._store.logs
        return [
            LogPlace(node.name, node.folder, state.host_of(node), None if node.host else str(kept / node.name))
            for node in state.nodes
        ]

    def environment(self, state: ClusterState) -> dict[str, str]:
        found = super().environment(state)
        # Over ssh a program of this machine reaches the job API alone.
        return found if state.kind == "ssh" else {"RAY_ADDRESS": state.address, **found, **state.environment}

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        if state.dashboard and not state.head.host:
            return f"open http://127.0.0.1:{state.dashboard}", "the dashboard; it asks for the token"
        return super().dashboard(state)

    def _start_again(
        self, config: MachineCluster, state: ClusterState, lost: list[ClusterNode], python: str
    ) -> list[ClusterNode]:
        """Start lost nodes again; return those that did not come up."""
        stuck = stop_nodes(self._store, state, self._say, lost)
        found = places_again(config, [node for node in lost if node.name not in stuck], python, self._say)
        fit = [node for node in lost if node.name in found]
        for node in fit:
            node.folder = f"{found[node.name].root}/{node_folder_name()}"
            node.address = found[node.name].address
        self._forget_processes(state, fit)
        failed = self._starter(config, state, list(found.values())).start(fit)
        stop_nodes(self._store, state, self._say, failed)
        self._forget_processes(state, failed)
        return [node for node in lost if node in failed or node not in fit]

    def _starter(self, config: MachineCluster, state: ClusterState, found: list[Place]) -> NodeStarter:
        return NodeStarter(config, self._store, state, {place.name: place for place in found}, self._say)

    def _forget_processes(self, state: ClusterState, nodes: list[ClusterNode]) -> None:
        for node in nodes:
            node.pid, node.start_id = 0, ""
        self._store.save(state)


def _fewest(config: MachineCluster, state: ClusterState) -> int:
    """Return how many nodes must come up."""
    return config.min_hosts if isinstance(config, SshCluster) and config.min_hosts else len(state.nodes)


def _node_names(nodes: list[ClusterNode]) -> str:
    return ", ".join(node.name for node in nodes)
