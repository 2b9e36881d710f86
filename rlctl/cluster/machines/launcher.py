"""Launcher of clusters on existing machines: this one, or others over ssh."""

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
from rlctl.run.interrupts import ignore_signals
from rlctl.workers import LOOPBACK_ONLY

MachineCluster = LocalCluster | SshCluster


class MachineLauncher(Launcher):
    """Launcher of the kinds `local` and `ssh`."""

    def prepare(self, config: MachineCluster) -> tuple[ClusterState, list[str]]:
        self._places, warnings = places(config, self._say)
        state = ClusterState(
            name=self._store.name,
            kind=config.kind,
            phase="starting",
            python=sys.executable,
            token_sha256=self._store.new_token(),
            listen_on_all=config.listen_on_all,
            created=time.time(),
        )
        if isinstance(config, SshCluster):
            state.python = config.python
            state.ssh_options = config.ssh_options
            state.connect_timeout_s = config.connect_timeout_s
            state.storage = config.storage.rstrip("/")
        state.config = asdict(config)
        state.environment = dict(LOOPBACK_ONLY) if is_loopback(self._places[0].address) else {}
        state.nodes = [
            ClusterNode(
                name=place.name,
                host=place.host,
                folder=f"{place.root}/{node_folder_name()}",
                head=index == 0,
                address=place.address,
            )
            for index, place in enumerate(self._places)
        ]
        self._store.keep_logs_of([node.name for node in state.nodes])
        return state, warnings

    def start(self, config: MachineCluster, state: ClusterState) -> list[str]:
        """Start the head, then all other nodes at the same time.

        If enough nodes are up (min_hosts), failed ones are removed from the state.
        """
        logs = f"nothing is left running; all it wrote: rlctl cluster logs {state.name}"
        starter = self._starter(config, state, self._places)
        if starter.start([state.head]):
            raise ClusterError(f"the head did not start, {logs}")
        warnings = [] if self._places[0].has_dashboard else [NO_DASHBOARD.format(where="head")]
        failed = starter.start([node for node in state.nodes if not node.head])
        if not failed:
            return warnings
        if len(state.nodes) - len(failed) < _fewest_nodes(config, state):
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
        # Only nodes on this machine are checked. Other machines are not asked.
        local_nodes = [node for node in state.nodes if not node.host]
        living_nodes = [node for node in local_nodes if lives(node.process)]
        if living_nodes == local_nodes:
            return "up"
        return "partly up" if state.head in living_nodes else "gone"

    def repair(self, config: MachineCluster, state: ClusterState, status: ClusterStatus) -> list[str]:
        """Restart the nodes that the cluster has lost, and return their names. Raises ClusterError if too few came up.

        A host that does not answer is left alone, because its processes are unknown. A failed node stays in the state:
        `status` shows it, and another `up` tries again.
        """
        # Use the config with which the cluster was started: a new one would not change the other nodes.
        config = CLUSTER_KINDS[state.kind](**state.config) if state.config else config
        lost = [node_status.node for node_status in status.nodes[1:] if node_status.condition in ("gone", "not joined")]
        # If Ray on the head does not answer, no node could join, and living nodes count as "not joined" too.
        if not lost or not status.nodes[0].in_ray:
            return []
        self._say("warning", f"{_node_names(lost)} gone: starting again, the other nodes are left as they are")
        try:
            failed = self._start_again(config, state, lost, python=status.nodes[0].facts["python"])
        except BaseException:
            with ignore_signals():
                self._say("doing", "stopping what was started; the other nodes stay")
                stop_nodes(self._store, state, self._say, lost)
                self._forget_processes(state, lost)
            raise
        num_restarted = len(lost) - len(failed)
        num_up = sum(node_status.condition == "up" for node_status in status.nodes) + num_restarted
        if failed and num_up < _fewest_nodes(config, state):
            remedy = f"all they wrote: rlctl cluster logs {state.name}; then again: rlctl cluster up"
            raise ClusterError(f"{_node_names(failed)} did not come back, the other nodes stay up; {remedy}")
        return [node.name for node in lost if node not in failed]

    def stop(self, state: ClusterState) -> list[str]:
        uncleared = stop_nodes(self._store, state, self._say, state.nodes)
        if uncleared:
            state.nodes = [node for node in state.nodes if node.name in uncleared]
            # Every state has a head, which `ClusterState.head` returns: another node is named so if the head is gone.
            if not any(node.head for node in state.nodes):
                state.nodes[0].head = True
        return uncleared

    def logs(self, state: ClusterState) -> list[LogPlace]:
        places = []
        for node in state.nodes:
            # Another host keeps the logs in its own home.
            keep = None if node.host else str(self._store.logs / node.name)
            places.append(LogPlace(node=node.name, folder=node.folder, host=state.host_of(node), keep=keep))
        return places

    def environment(self, state: ClusterState) -> dict[str, str]:
        variables = super().environment(state)
        if state.kind == "ssh":
            # Over ssh a program on this machine can reach only the job API.
            return variables
        return {"RAY_ADDRESS": state.address, **variables, **state.environment}

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        if state.dashboard and not state.head.host:
            return f"open http://127.0.0.1:{state.dashboard}", "the dashboard; it asks for the token"
        return super().dashboard(state)

    def _start_again(
        self, config: MachineCluster, state: ClusterState, lost: list[ClusterNode], python: str
    ) -> list[ClusterNode]:
        """Restart lost nodes. Return the nodes that did not come up. python: Python version of the head."""
        # A lost node may have left processes: they must end before a new node starts there.
        stuck_names = stop_nodes(self._store, state, self._say, lost)
        stopped = [node for node in lost if node.name not in stuck_names]
        places = places_again(config, stopped, python, self._say)
        startable = [node for node in lost if node.name in places]
        for node in startable:
            node.folder = f"{places[node.name].root}/{node_folder_name()}"
            node.address = places[node.name].address
        self._forget_processes(state, startable)
        failed = self._starter(config, state, list(places.values())).start(startable)
        stop_nodes(self._store, state, self._say, failed)
        self._forget_processes(state, failed)
        return [node for node in lost if node in failed or node not in startable]

    def _starter(self, config: MachineCluster, state: ClusterState, places: list[Place]) -> NodeStarter:
        """Return the starter of nodes at these places."""
        return NodeStarter(
            config=config,
            store=self._store,
            state=state,
            places={place.name: place for place in places},
            say=self._say,
        )

    def _forget_processes(self, state: ClusterState, nodes: list[ClusterNode]) -> None:
        """Save in the state that no process of these nodes runs."""
        for node in nodes:
            node.pid = 0
            node.start_id = ""
        self._store.save(state)


def _fewest_nodes(config: MachineCluster, state: ClusterState) -> int:
    """Return the least number of nodes that must come up."""
    return config.min_hosts if isinstance(config, SshCluster) and config.min_hosts else len(state.nodes)


def _node_names(nodes: list[ClusterNode]) -> str:
    return ", ".join(node.name for node in nodes)
