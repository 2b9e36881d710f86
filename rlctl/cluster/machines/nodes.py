"""Starts the nodes of a cluster: the head, then the others at the same time.

A node is started in one question to its host, which answers at once, and waited for in another: Ctrl-C between the
two, or during either, leaves the caller with a state that names everything there is to stop.
"""

import time

from rlctl.cluster.down import stop_nodes
from rlctl.cluster.hosts import HostCalls, HostError
from rlctl.cluster.launcher import Say
from rlctl.cluster.ray_start import Place, joined, start_request
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, folder_name
from rlctl.config.cluster_schema import LocalCluster, SshCluster

# Starting a process and going; and what a wait takes beside the waiting.
_START_S, _MORE_S = 60.0, 60.0
# Ray gives its own processes 30 s, a constant of its code, which a machine that is busy for a moment overruns.
TOO_SLOW = "timed out during startup"


class NodeStarter:
    """Starts what `state` names on `spots`, which are in the same order; keeps the state's file up to date."""

    def __init__(
        self,
        config: LocalCluster | SshCluster,
        store: ClusterStore,
        state: ClusterState,
        spots: list[Place],
        token: str,
        say: Say,
    ) -> None:
        self._config, self._store, self._state, self._token, self._say = config, store, state, token, say
        self._spots = {spot.name: spot for spot in spots}

    def start(self) -> list[str]:
        """Returns warnings; nodes that failed, and could be spared, are in the state no more. Raises ClusterError."""
        state, head = self._state, self._state.head
        if self.start_nodes([head]):
            what = f"the head did not start, nothing stands; all it wrote: rlctl cluster logs {state.name}"
            raise ClusterError(what)
        dashboard = self._spots[head.name].dashboard
        found = [] if dashboard else ["no dashboard, no job API: install 'ray[default]' on the head for them"]
        failed = self.start_nodes([node for node in state.nodes if not node.head])
        if not failed:
            return found
        config = self._config
        least = config.min_hosts if isinstance(config, SshCluster) and config.min_hosts else len(state.nodes)
        if len(state.nodes) - len(failed) < least:
            names = ", ".join(node.name for node in failed)
            raise ClusterError(f"{names} did not start, nothing stands; all it wrote: rlctl cluster logs {state.name}")
        stop_nodes(self._store, state, self._say, failed)
        state.nodes = [node for node in state.nodes if node not in failed]
        return [*found, f"going on without {', '.join(node.name for node in failed)} (min_hosts)"]

    def start_nodes(self, nodes: list[ClusterNode]) -> list[ClusterNode]:
        """Start these and wait for them, again if Ray's own deadline was too short. Returns those that failed."""
        if not nodes:
            return []
        failed = self._attempt(nodes)
        slow = [node for node in nodes if TOO_SLOW in failed.get(node.name, "")]
        if slow:
            self._say("warning", f"{', '.join(node.name for node in slow)}: Ray was too slow to start; once more")
            stop_nodes(self._store, self._state, self._say, slow)
            for node in slow:
                node.folder, node.pid = f"{self._spots[node.name].root}/{folder_name()}", 0
            self._store.save(self._state)
            failed = {name: why for name, why in failed.items() if TOO_SLOW not in why} | self._attempt(slow)
        for name, why in failed.items():
            self._say("bad", f"{name}: did not start: {why}")
        return [node for node in nodes if node.name in failed]

    def _attempt(self, nodes: list[ClusterNode]) -> dict[str, str]:
        """Why, by name, for the nodes that did not come up."""
        began, failed = time.monotonic(), {}
        self._say("doing", f"starting {', '.join(node.name for node in nodes)}")
        requests = [
            start_request(self._config, self._state, node, self._spots[node.name], self._token) for node in nodes
        ]
        hosts = [self._state.host_of(node) for node in nodes]
        starting = HostCalls(((host, "start", request) for host, request in zip(hosts, requests)), _START_S)
        try:
            for index, answer in starting.answers():
                if isinstance(answer, HostError):
                    failed[nodes[index].name] = str(answer)
                else:
                    self._record(nodes[index], answer)
        finally:
            # A start under way is not abandoned: it would go on over there after the clearing up.
            starting.finish()
            self._store.save(self._state)
        return failed | self._wait([node for node in nodes if node.name not in failed], began)

    def _wait(self, nodes: list[ClusterNode], began: float) -> dict[str, str]:
        asked = [(self._state.host_of(node), "wait", self._wait_request(node)) for node in nodes]
        waiting = HostCalls(asked, self._config.start_timeout_s + _MORE_S)
        failed = {}
        try:
            for index, answer in waiting.answers():
                node = nodes[index]
                if isinstance(answer, HostError) or not answer["ready"]:
                    failed[node.name] = str(answer) if isinstance(answer, HostError) else answer["why"]
                    continue
                if node.head and not answer["dashboard"]:
                    self._state.dashboard = 0
                where = f", at {self._state.address}" if node.head else ""
                self._say("ok", f"{node.name}: up in {time.monotonic() - began:.1f} s{where}")
        except BaseException:
            waiting.cancel()
            raise
        return failed

    def _record(self, node: ClusterNode, started: dict[str, object]) -> None:
        node.folder, node.pid = str(started["folder"]), int(str(started["pid"]))
        node.create_time = float(str(started["create_time"]))
        if node.head:
            ports = started["ports"]
            assert isinstance(ports, dict)
            self._state.address = joined(node.address, ports["port"])
            self._state.dashboard = ports["dashboard-port"]

    def _wait_request(self, node: ClusterNode) -> dict[str, object]:
        port = self._state.dashboard if node.head and self._spots[node.name].dashboard else None
        started = {"folder": node.folder, "pid": node.pid, "create_time": node.create_time}
        head = None if node.head else [self._state.head.address, int(self._state.address.rpartition(":")[2])]
        return {**started, "port": port, "head": head, "deadline_s": self._config.start_timeout_s}
