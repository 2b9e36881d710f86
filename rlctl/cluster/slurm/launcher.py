"""A Ray cluster that is a Slurm job: submitted, waited for, looked at through steps of its own, cancelled.

The job brings itself up: its tasks (`remote_scripts/task.py`) start the Ray nodes and say so in files of a folder that
this machine and the nodes share.

    SHARED/              0700: job-TAG in the cluster's own folder, or shared_folder/rlctl-NAME-TAG
        job.sh           what was submitted
        plan.json token remote_scripts/     what the tasks read
        nodes/INDEX.json             what they say
        logs/NODE/                   what they leave
"""

import sys
import time
from pathlib import Path

from rlctl.cluster.hosts import Host
from rlctl.cluster.inspect import look_at_hosts
from rlctl.cluster.launcher import ClusterStatus, LogPlace, NodeStatus, PreparedCluster, Say
from rlctl.cluster.machines.launcher import tunnel
from rlctl.cluster.slurm import queue
from rlctl.cluster.slurm.batch import batch_script
from rlctl.cluster.slurm.folder import JobFolder
from rlctl.cluster.slurm.start import JobStarter
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore, folder_name
from rlctl.config.cluster_schema import SlurmCluster

# From being asked to end until the last node has cleared up: Slurm's KillWait is 30 s unless a site says otherwise.
_STOP_S = 180.0
_SOON_MINUTES = 10


class SlurmLauncher:
    """The kind `slurm`."""

    def prepare(self, config: SlurmCluster, store: ClusterStore, say: Say) -> PreparedCluster:
        queue.must_be_here()
        token, digest = store.new_token()
        python = config.python or sys.executable
        state = ClusterState(store.name, config.kind, "starting", python, digest, config.listen_on_all, time.time())
        state.setup = config.setup
        state.job_name, state.shared = _names(config, store)
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        # What they are called is known once Slurm has chosen them.
        state.nodes = [ClusterNode(title, "", "", title == "head", "") for title in titles]
        return PreparedCluster(state, JobStarter(config, store, state, JobFolder(state.shared), token, say).start)

    def dry_run(self, config: SlurmCluster, store: ClusterStore, job: str | None) -> str:
        if job is not None:
            raise ClusterError("--job is for kubernetes: bring the cluster up, then rlctl train --cluster")
        return batch_script(config, *_names(config, store), config.python or sys.executable)

    def look(self, store: ClusterStore, state: ClusterState) -> ClusterStatus:
        store.check_token(state)
        job = queue.look_up(state.job) if state.job else queue.Job("", "PENDING", "not submitted yet")
        nodes = sorted(state.nodes, key=lambda node: not node.head)
        if job.waits or (job.runs and not state.head.host):
            doing = f"waits in the queue: {job.reason}" if job.waits else "starts its nodes"
            return ClusterStatus(
                [NodeStatus(node, unreachable=f"job {job.id} {doing}") for node in nodes], [f"job {job.id} {doing}"]
            )
        if not job.runs:
            clear = f"; clear up: rlctl cluster down {state.name}"
            return ClusterStatus([NodeStatus(node) for node in nodes], [job.ending + clear])
        seen = look_at_hosts(store, state)
        minutes, _, seconds = job.left.partition(":")
        if seconds.isdecimal() and int(minutes) < _SOON_MINUTES:
            seen.warnings.append(f"job {job.id} ends in {job.left} minutes: its time limit")
        return seen

    def glance(self, state: ClusterState) -> str:
        try:
            job = queue.look_up(state.job)
        except ClusterError:
            return "unknown"
        return "up" if job.runs else "waiting" if job.waits else "gone"

    def mend(
        self, config: SlurmCluster, store: ClusterStore, state: ClusterState, seen: ClusterStatus, say: Say
    ) -> list[str]:
        # A job that has lost a node has lost its place for it.
        return []

    def stop(self, store: ClusterStore, state: ClusterState, say: Say) -> list[str]:
        try:
            # One that was submitted a moment before the end of an earlier rlctl is known by its name alone.
            jobs = [state.job] if state.job else queue.find(state.job_name)
            left = _cancelled(jobs, say)
        except ClusterError as error:
            say("bad", str(error))
            left = [f"job {state.job or state.job_name}"]
        if left:
            return left
        shared = JobFolder(state.shared)
        for bad in shared.uncleared():
            say("bad", bad)
        shared.remove(store.logs)
        return []

    def logs(self, store: ClusterStore, state: ClusterState) -> list[LogPlace]:
        kept, runs = Path(state.shared) / "logs", queue.look_up(state.job).runs if state.job else False
        places = [LogPlace("job", "", Host(""), str(kept / "job"))]
        for node in state.nodes:
            if runs and node.host:
                places.append(LogPlace(node.name, node.folder, state.host_of(node), None))
            else:
                places.append(LogPlace(node.name, "", Host(""), str(kept / node.name)))
        return places

    def environment(self, store: ClusterStore, state: ClusterState) -> dict[str, str]:
        store.check_token(state)
        found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(store.token_path)}
        return {**found, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{state.dashboard}"} if state.dashboard else found

    def dashboard(self, state: ClusterState) -> tuple[str, str] | None:
        return tunnel(state, []) if state.dashboard else None


def _cancelled(jobs: list[str], say: Say) -> list[str]:
    """Ends jobs and waits until they are over. Returns those that are not."""
    living = [job for job in jobs if _lives(job)]
    if not living:
        return []
    say("doing", f"cancelling job {', '.join(living)}")
    queue.cancel(living)
    end = time.monotonic() + _STOP_S
    while living and time.monotonic() < end:
        time.sleep(1)
        living = [job for job in living if _lives(job)]
    for job in living:
        say("bad", f"job {job} has not ended {_STOP_S:g} s after scancel: see `scontrol show job {job}`")
    return [f"job {job}" for job in living]


def _lives(job: str) -> bool:
    found = queue.look_up(job)
    return found.runs or found.waits


def _names(config: SlurmCluster, store: ClusterStore) -> tuple[str, str]:
    """Of a new job, and of its shared folder: nobody's yet."""
    tag = folder_name().rpartition("-")[2]
    name = f"rlctl-{store.name}-{tag}"
    if config.shared_folder is None:
        return name, str(store.folder / f"job-{tag}")
    return name, str(Path(config.shared_folder).expanduser().absolute() / name)
