"""Launcher of Ray clusters in Slurm: submits a job, waits until its nodes are up, inspects them by job steps, cancels.

The job's tasks (`remote_scripts/task.py`) start the Ray nodes. They report in files of a shared folder, see `job.py`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import Host
from rlctl.cluster.inspect import ask_nodes
from rlctl.cluster.launcher import ClusterStatus, Launcher, LogPlace, NodeStatus
from rlctl.cluster.ray_start import NO_DASHBOARD, join_address
from rlctl.cluster.requirements import facts, problems
from rlctl.cluster.slurm import queue
from rlctl.cluster.slurm.job import JobFolder, batch_script, job_plan
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, node_folder_name
from rlctl.config.cluster_schema import SlurmCluster

# Seconds from scancel until the last node has cleaned up. Slurm's KillWait is 30 s by default.
_STOP_S = 180.0
_SOON_MINUTES = 10
# Seconds between two calls to Slurm, whose controller all users share, and between two reads of the shared folder.
_QUEUE_S = 5.0
_REPORTS_S = 0.5
# Most seconds until another machine sees a new file on a network file system.
_FILES_S = 90.0


class SlurmLauncher(Launcher):
    """Launcher of the kind `slurm`. A lost node is not restarted, because its job has lost the node."""

    def prepare(self, config: SlurmCluster) -> tuple[ClusterState, list[str]]:
        queue.must_be_here()
        state = ClusterState(
            name=self._store.name,
            kind=config.kind,
            phase="starting",
            python=config.python or sys.executable,
            token_sha256=self._store.new_token(),
            listen_on_all=config.listen_on_all,
            created=time.time(),
            setup=config.setup,
        )
        state.job_name, state.shared = self._new_names(config)
        # Slurm chooses the nodes later, so these names are placeholders.
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        state.nodes = [
            ClusterNode(name=title, host="", folder="", head=title == "head", address="") for title in titles
        ]
        return state, []

    def start(self, config: SlurmCluster, state: ClusterState) -> list[str]:
        folder = JobFolder(state.shared)
        folder.make()
        script = batch_script(config, state.job_name, state.shared, state.python)
        folder.fill(script, job_plan(config, state), self._store.token())
        self._say("doing", "submitting")
        state.job = queue.submit(str(folder.script))
        self._store.save(state)
        self._say("ok", f"submitted as job {state.job}")
        self._wait_in_queue(config, state)
        self._wait_for_nodes(config, state)
        return [] if state.dashboard else [NO_DASHBOARD.format(where="nodes")]

    def dry_run(self, config: SlurmCluster, job: str | None) -> str:
        if job is not None:
            raise ClusterError("--job is for kubernetes: bring the cluster up, then rlctl train --cluster")
        job_name, folder = self._new_names(config)
        return batch_script(config, job_name, folder, config.python or sys.executable)

    def status(self, state: ClusterState) -> ClusterStatus:
        self._store.check_token(state)
        job = queue.look_up(state.job) if state.job else queue.Job(id="", state="PENDING", reason="not submitted yet")
        # Without a host of the head, no node has reported that it is ready.
        if job.waits or (job.runs and not state.head.host):
            progress = f"job {job.id} starts its nodes"
            if job.waits:
                progress = f"job {job.id} waits in the queue: {job.reason}"
            return ClusterStatus([NodeStatus(node, unreachable=progress) for node in state.head_first], [progress])
        if not job.runs:
            remedy = f"clear up: rlctl cluster down {state.name}"
            return ClusterStatus([NodeStatus(node) for node in state.head_first], [f"{job.ending}; {remedy}"])
        status = ask_nodes(state)
        # Slurm writes less than an hour as minutes:seconds. After the first colon of a longer time comes no number.
        minutes, _, seconds = job.time_left.partition(":")
        if seconds.isdecimal() and int(minutes) < _SOON_MINUTES:
            status.warnings.append(f"job {job.id} ends in {job.time_left} minutes: its time limit")
        return status

    def quick_condition(self, state: ClusterState) -> str:
        try:
            job = queue.look_up(state.job)
        except ClusterError:
            return "unknown"
        return "up" if job.runs else "waiting" if job.waits else "gone"

    def stop(self, state: ClusterState) -> list[str]:
        try:
            # If rlctl ended just after submitting, only the job's name is known, not its id.
            uncleared = self._cancel([state.job] if state.job else queue.find(state.job_name))
        except ClusterError as error:
            self._say("bad", str(error))
            uncleared = [f"job {state.job or state.job_name}"]
        if uncleared:
            return uncleared
        folder = JobFolder(state.shared)
        for problem in folder.cleanup_problems():
            self._say("bad", problem)
        folder.remove(self._store.logs)
        return []

    def logs(self, state: ClusterState) -> list[LogPlace]:
        shared_logs = Path(state.shared) / "logs"
        is_running = queue.look_up(state.job).runs if state.job else False
        places = [LogPlace(node="job", folder="", host=Host(""), keep=str(shared_logs / "job"))]
        for node in state.nodes:
            if is_running and node.host:
                place = LogPlace(node=node.name, folder=node.folder, host=state.host_of(node), keep=None)
            else:
                place = LogPlace(node=node.name, folder="", host=Host(""), keep=str(shared_logs / node.name))
            places.append(place)
        return places

    def _wait_in_queue(self, config: SlurmCluster, state: ClusterState) -> None:
        """Wait until Slurm runs the job, and report each new reason to wait. Raises ClusterError."""
        begin = time.monotonic()
        reported_reason = ""
        job = queue.look_up(state.job)
        while job.waits:
            waited_s = time.monotonic() - begin
            if waited_s > config.wait_s:
                problem = f"job {job.id} still waits in the queue after {waited_s:.0f} s: {job.reason}"
                raise ClusterError(f"{problem}; nothing is left running: ask for less, or wait longer with wait_s=...")
            if job.reason not in ("None", reported_reason):
                reported_reason = job.reason
                self._say("ok", f"job {job.id} waits in the queue: {job.reason}")
            self._say("doing", f"job {job.id} waits in the queue: {job.reason}, {waited_s:.0f} s")
            # The interval between two calls grows with the waiting time.
            time.sleep(min(_QUEUE_S, 0.5 + waited_s / 10))
            job = queue.look_up(state.job)
        self._must_run(state, job)
        self._say("ok", f"job {job.id} runs on {job.nodes} after {time.monotonic() - begin:.0f} s")

    def _wait_for_nodes(self, config: SlurmCluster, state: ClusterState) -> None:
        """Wait until every node's report says that it is ready. Raises ClusterError if a node fails."""
        begin = time.monotonic()
        last_look_up = 0.0
        count = len(state.nodes)
        ready: set[int] = set()
        while len(ready) < count:
            reports = JobFolder(state.shared).reports()
            self._say("doing", f"starting {count - len(ready)} of {count} nodes")
            for index, report in sorted(reports.items()):
                self._check_node(config, report)
                # Nodes join after the head, but a network file system may show their reports first.
                if report.get("ready") and index not in ready and (index == 0 or 0 in ready):
                    ready.add(index)
                    self._record_node(state, index, report)
                    where = f", at {state.address}" if index == 0 else ""
                    text = f"{facts(report['found'])}; up in {time.monotonic() - begin:.1f} s{where}"
                    self._say("ok", f"{report['name']}: {text}")
            if time.monotonic() > last_look_up + _QUEUE_S:
                last_look_up = time.monotonic()
                self._must_run(state, queue.look_up(state.job), f": rlctl cluster logs {state.name}")
            # A node waits for the head, then starts. Each may take `start_timeout_s`.
            if time.monotonic() > begin + 2 * config.start_timeout_s + _FILES_S:
                problem = f"{count - len(ready)} of {count} nodes of job {state.job} said nothing"
                remedy = f"is {state.shared} on a file system that they share? set shared_folder=..."
                raise ClusterError(f"{problem}: {remedy}")
            time.sleep(_REPORTS_S)

    def _check_node(self, config: SlurmCluster, report: dict[str, Any]) -> None:
        """Raise ClusterError if a node's host is unfit, or if the node failed to start."""
        name = str(report.get("name"))
        node_problems = []
        if report.get("found") is not None:
            # Clocks are not checked, because Slurm itself refuses messages between hosts with different clocks.
            node_problems = problems(report["found"], config.min_disk_gib)
        # An unfit host explains a failed start, so the reason of the failure is not added.
        if report.get("why"):
            node_problems = node_problems or [f"did not start: {report['why']}"]
        for problem in node_problems:
            self._say("bad", f"{name}: {problem}")
        if node_problems:
            logs = f"all it wrote: rlctl cluster logs {self._store.name}"
            raise ClusterError(f"{name} will not do, nothing is left running; {logs}")

    def _record_node(self, state: ClusterState, index: int, report: dict[str, Any]) -> None:
        fields = {name: report[name] for name in ("name", "host", "folder", "address", "pid", "start_id")}
        state.nodes[index] = ClusterNode(**fields, head=index == 0)
        if index == 0:
            state.address = join_address(report["address"], report["ports"]["port"])
            state.dashboard = report["ports"]["dashboard-port"] if report["dashboard"] else 0
        self._store.save(state)

    def _must_run(self, state: ClusterState, job: queue.Job, remedy: str = "") -> None:
        """Raise ClusterError with the reason if the job has ended. remedy: end of the message."""
        if not job.runs:
            ending = job.ending
            if last_words := JobFolder(state.shared).last_words():
                ending += f": {last_words}"
            raise ClusterError(f"{ending}; nothing is left running{remedy}")

    def _cancel(self, job_ids: list[str]) -> list[str]:
        """Cancel jobs and wait until they have ended. Return the names of jobs that have not."""

        def select_living(job_ids: list[str]) -> list[str]:
            jobs = map(queue.look_up, job_ids)
            return [job.id for job in jobs if job.runs or job.waits]

        living_ids = select_living(job_ids)
        if living_ids:
            self._say("doing", f"cancelling job {', '.join(living_ids)}")
            queue.cancel(living_ids)
        end = time.monotonic() + _STOP_S
        while living_ids and time.monotonic() < end:
            time.sleep(1)
            living_ids = select_living(living_ids)
        for job_id in living_ids:
            remedy = f"see `scontrol show job {job_id}`"
            self._say("bad", f"job {job_id} has not ended {_STOP_S:g} s after scancel: {remedy}")
        return [f"job {job_id}" for job_id in living_ids]

    def _new_names(self, config: SlurmCluster) -> tuple[str, str]:
        """Return a new job name, and the path of its shared folder."""
        tag = node_folder_name().rpartition("-")[2]
        name = f"rlctl-{self._store.name}-{tag}"
        if config.shared_folder is None:
            return name, str(self._store.folder / f"job-{tag}")
        return name, str(Path(config.shared_folder).expanduser().absolute() / name)
