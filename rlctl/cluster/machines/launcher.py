"""Clusters of machines that are there already, this one or others over ssh: their launcher."""

import shlex
import sys
import time
from dataclasses import asdict

from rlctl.cluster.down import stop_nodes
from rlctl.cluster.inspect import look_at_hosts
from rlctl.cluster.launcher import ClusterStatus, LogPlace, PreparedCluster, Say
from rlctl.cluster.machines.checks import places
from rlctl.cluster.machines.nodes import NodeStarter
from rlctl.cluster.machines.repair import mend
from rlctl.cluster.ray_start import driver_environment, is_loopback
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, folder_name
from rlctl.config.cluster_schema import CLUSTER_KINDS, LocalCluster, SshCluster
from rlctl.utils.process import lives


class MachineLauncher:
    """The kinds `local` and `ssh`."""

    def prepare(self, config: LocalCluster | SshCluster, store: ClusterStore, say: Say) -> PreparedCluster:
        spots, found = places(config, say)
        token, digest = store.new_token()
        state = ClusterState(
            store.name, config.kind, "starting", sys.executable, digest, config.listen_on_all, time.time()
        )
        if isinstance(config, SshCluster):
            state.python, state.ssh_options = config.python, config.ssh_options
            state.connect_timeout_s = config.connect_timeout_s
            state.storage = config.storage.rstrip("/")
        state.config = asdict(config)
        state.environment = driver_environment(is_loopback(spots[0].address))
        state.nodes = [
            ClusterNode(place.name, place.host, f"{place.root}/{folder_name()}", index == 0, place.address)
            for index, place in enumerate(spots)
        ]
        store.keep_logs_of([node.name for node in state.nodes])
        return PreparedCluster(state, NodeStarter(config, store, state, spots, token, say).start, found)

    def dry_run(self, config: LocalCluster | SshCluster, store: ClusterStore, job: str | None) -> str:
        raise ClusterError(f"--dry-run shows what is submitted, and {config.kind} submits nothing: leave it out")

    def look(self, store: ClusterStore, state: ClusterState) -> ClusterStatus:
        return look_at_hosts(store, state)

    def glance(self, state: ClusterState) -> str:
        # Other machines are not asked.
        here = [node for node in state.nodes if not node.host]
        if not here:
            return "up"
        alive = [node for node in here if lives(node.pid, node.create_time, None)]
        return "up" if alive == here else "partly up" if state.head in alive else "gone"

    def mend(
        self, config: LocalCluster | SshCluster, store: ClusterStore, state: ClusterState, seen: ClusterStatus, say: Say
    ) -> list[str]:
        # As it was started: what `up` is given now would change nothing of the rest either.
        first = CLUSTER_KINDS[state.kind](**state.config) if state.config else config
        return mend(first, store, state, seen, say)

    def stop(self, store: ClusterStore, state: ClusterState, say: Say) -> list[str]:
        left = stop_nodes(store, state, say)
        if left:
            state.nodes = [node for node in state.nodes if node.name in left]
            if not any(node.head for node in state.nodes):
                state.nodes[0].head = True
        return left

    def logs(self, store: ClusterStore, state: ClusterState) -> list[LogPlace]:
        return [
            LogPlace(node.name, node.folder, state.host_of(node), None if node.host else str(store.logs / node.name))
            for node in state.nodes
        ]

    def environment(self, store: ClusterStore, state: ClusterState) -> dict[str, str]:
        store.check_token(state)
        found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(store.token_path)}
        if state.dashboard:
            found["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{state.dashboard}"
        # Over ssh a program of this machine meets the job API alone.
        return found if state.kind == "ssh" else {"RAY_ADDRESS": state.address, **found, **state.environment}

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        if not state.dashboard:
            return None
        if not state.head.host:
            return f"open http://127.0.0.1:{state.dashboard}", "the dashboard; it asks for the token"
        return tunnel(state, state.ssh_options)


def tunnel(state: ClusterState, ssh_options: list[str]) -> tuple[str, str]:
    """The command that brings the dashboard of another machine to this one's loopback."""
    forward = f"{state.dashboard}:127.0.0.1:{state.dashboard}"
    command = f"ssh -N -L {forward} {shlex.join([*ssh_options, state.head.host])}"
    return command, f"the dashboard, at http://127.0.0.1:{state.dashboard}"
