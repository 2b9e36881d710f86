"""Starting and stopping of Ray nodes on machines.

One call to the host starts a node and returns at once. A second call waits until the node is up. So at Ctrl-C, between
or during these calls, the state names every node that must be stopped.
"""

import time
from typing import Any

from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import Say
from rlctl.cluster.ray_start import TOO_SLOW, Place, join_address, start_request
from rlctl.cluster.state import ClusterNode, ClusterState, ClusterStore, node_folder_name
from rlctl.config.cluster_schema import LocalCluster, SshCluster

# Deadlines in seconds: to start a node, to stop one, and an addition to the deadline of a wait.
_START_S = 60.0
_STOP_S = 90.0
_MORE_S = 60.0


class NodeStarter:
    """Starter of nodes. It saves each change of `state` to the file. places: node name -> place."""

    def __init__(
        self,
        config: LocalCluster | SshCluster,
        store: ClusterStore,
        state: ClusterState,
        places: dict[str, Place],
        say: Say,
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._places = places
        self._say = say
        self._token = store.token()

    def start(self, nodes: list[ClusterNode]) -> list[ClusterNode]:
        """Start nodes and wait until they are up. Retry once the nodes that were too slow. Return the failed nodes."""
        failed = self._start_nodes(nodes)
        slow = [node for node in nodes if TOO_SLOW in failed.get(node.name, "")]
        if slow:
            self._say("warning", f"{', '.join(node.name for node in slow)}: Ray was too slow to start; once more")
            stop_nodes(self._store, self._state, self._say, slow)
            # In a new folder: `start` of node.py creates it, and the old one may not be removed.
            for node in slow:
                node.folder = f"{self._places[node.name].root}/{node_folder_name()}"
                node.pid = 0
            self._store.save(self._state)
            failed = {name: reason for name, reason in failed.items() if TOO_SLOW not in reason}
            failed |= self._start_nodes(slow)
        for name, reason in failed.items():
            self._say("bad", f"{name}: did not start: {reason}")
        return [node for node in nodes if node.name in failed]

    def _start_nodes(self, nodes: list[ClusterNode]) -> dict[str, str]:
        """Start nodes and wait until they are up. Return name -> reason, for the failed nodes."""
        if not nodes:
            return {}
        begin = time.monotonic()
        failed = {}
        self._say("doing", f"starting {', '.join(node.name for node in nodes)}")
        calls = []
        for node in nodes:
            request = start_request(self._config, self._state, node, self._places[node.name], self._token)
            calls.append((self._state.host_of(node), "node.start", request))
        try:
            # `finish`: wait for each call, because an abandoned start would go on at the host after the clean-up.
            with HostCalls(calls, _START_S, finish=True) as starting:
                for index, answer in starting.answers():
                    if isinstance(answer, HostError):
                        failed[nodes[index].name] = str(answer)
                    else:
                        self._record_node(nodes[index], answer)
        finally:
            self._store.save(self._state)
        return failed | self._wait_for_nodes([node for node in nodes if node.name not in failed], begin)

    def _wait_for_nodes(self, nodes: list[ClusterNode], begin: float) -> dict[str, str]:
        """Wait until nodes are up. Return name -> reason, for the failed nodes. begin: time of their start."""
        failed = {}
        calls = []
        for node in nodes:
            # Only the head serves the dashboard. Other nodes check meanwhile that the head answers.
            port = self._state.dashboard if node.head and self._places[node.name].has_dashboard else None
            head = None if node.head else [self._state.head.address, int(self._state.address.rpartition(":")[2])]
            request = {**node.process, "port": port, "head": head, "deadline_s": self._config.start_timeout_s}
            calls.append((self._state.host_of(node), "node.wait", request))
        with HostCalls(calls, self._config.start_timeout_s + _MORE_S) as waiting:
            for index, answer in waiting.answers():
                node = nodes[index]
                if isinstance(answer, HostError) or not answer["ready"]:
                    failed[node.name] = str(answer) if isinstance(answer, HostError) else answer["why"]
                    continue
                if node.head and not answer["dashboard"]:
                    # 0: the cluster has no dashboard, and takes no jobs.
                    self._state.dashboard = 0
                where = f", at {self._state.address}" if node.head else ""
                self._say("ok", f"{node.name}: up in {time.monotonic() - begin:.1f} s{where}")
        return failed

    def _record_node(self, node: ClusterNode, started: dict[str, Any]) -> None:
        """Write a started node's process into the state. started: reply of `start` of `remote_scripts/node.py`."""
        node.folder = started["folder"]
        node.pid = started["pid"]
        node.start_id = started["start_id"]
        if node.head:
            self._state.address = join_address(node.address, started["ports"]["port"])
            self._state.dashboard = started["ports"]["dashboard-port"]


def stop_nodes(store: ClusterStore, state: ClusterState, say: Say, nodes: list[ClusterNode]) -> list[str]:
    """Stop nodes, the head after the others. Return the names of nodes that could not be stopped."""
    uncleared: list[str] = []
    # Two waves: the nodes of a wave stop at the same time.
    for wave in ([node for node in nodes if not node.head], [node for node in nodes if node.head]):
        if not wave:
            continue
        say("doing", f"stopping {', '.join(node.name for node in wave)}")
        calls = []
        for node in wave:
            # A node on this machine leaves its logs in the cluster's folder, a node on another host in the home there.
            keep = None if node.host else str(store.logs / node.name)
            request = {"folder": node.folder, "keep": keep, "cluster": store.name, "node": node.name}
            calls.append((state.host_of(node), "node.stop", request))
        with HostCalls(calls, _STOP_S, finish=True) as stopping:
            for index, answer in stopping.answers():
                name = wave[index].name
                if isinstance(answer, HostError):
                    say("bad", f"{name}: {answer}")
                    uncleared.append(name)
                elif answer["left"]:
                    say("bad", f"{name}: processes {', '.join(map(str, answer['left']))} would not end")
                    uncleared.append(name)
                elif answer["logs"]:
                    say("ok", f"{name}: stopped; logs in {answer['logs']}")
    return uncleared
