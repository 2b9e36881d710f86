"""A Ray cluster that is a Slurm job: submitted, waited for, inspected through job steps, cancelled.

The job brings itself up: its tasks (`remote_scripts/task.py`) start the Ray nodes and report in files of a folder that
this machine and the nodes share (see `job.py`).
"""

import sys
import time
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import Host
from rlctl.cluster.inspect import ask_nodes
from rlctl.cluster.launcher import ClusterStatus, Launcher, LogPlace, NodeStatus
from rlctl.cluster.ray_start import NO_DASHBOARD, joined
from rlctl.cluster.requirements import facts, problems
from rlctl.cluster.slurm import queue
from rlctl.cluster.slurm.job import JobFolder, batch_script, job_plan
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, node_folder_name
from rlctl.config.cluster_schema import SlurmCluster

# From being asked to end until the last node has cleared up: Slurm's KillWait is 30 s unless a site says otherwise.
_STOP_S = 180.0
_SOON_MINUTES = 10
# Between two questions to Slurm, whose controller all users share, and between two looks at the shared folder.
_QUEUE_S, _REPORTS_S = 5.0, 0.5
# Delay with which a network file system may show a file to another machine.
_FILES_S = 90.0


class SlurmLauncher(Launcher):
    """The kind `slurm`. A lost node is not started again: its job has lost the place."""

    def prepare(self, config: SlurmCluster) -> tuple[ClusterState, list[str]]:
        queue.must_be_here()
        name, digest, python = self._store.name, self._store.new_token(), config.python or sys.executable
        state = ClusterState(name, config.kind, "starting", python, digest, config.listen_on_all, time.time())
        state.setup = config.setup
        state.job_name, state.shared = self._new_names(config)
        # Their real names are known once Slurm has chosen the nodes.
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        state.nodes = [ClusterNode(title, "", "", title == "head", "") for title in titles]
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
        return batch_script(config, *self._new_names(config), config.python or sys.executable)

    def status(self, state: ClusterState) -> ClusterStatus:
        self._store.check_token(state)
        job = queue.look_up(state.job) if state.job else queue.Job("", "PENDING", "not submitted yet")
        if job.waits or (job.runs and not state.head.host):
            doing = f"job {job.id} " + (f"waits in the queue: {job.reason}" if job.waits else "starts its nodes")
            return ClusterStatus([NodeStatus(node, unreachable=doing) for node in state.head_first], [doing])
        if not job.runs:
            clear = f"; clear up: rlctl cluster down {state.name}"
            return ClusterStatus([NodeStatus(node) for node in state.head_first], [job.ending + clear])
        status = ask_nodes(state)
        minutes, _, seconds = job.left.partition(":")
        if seconds.isdecimal() and int(minutes) < _SOON_MINUTES:
            status.warnings.append(f"job {job.id} ends in {job.left} minutes: its time limit")
        return status

    def quick_condition(self, state: ClusterState) -> str:
        try:
            job = queue.look_up(state.job)
        except ClusterError:
            return "unknown"
        return "up" if job.runs else "waiting" if job.waits else "gone"

    def stop(self, state: ClusterState) -> list[str]:
        try:
            # One that was submitted a moment before the end of an earlier rlctl is known by its name alone.
            left = self._cancel([state.job] if state.job else queue.find(state.job_name))
        except ClusterError as error:
            self._say("bad", str(error))
            left = [f"job {state.job or state.job_name}"]
        if left:
            return left
        shared = JobFolder(state.shared)
        for line in shared.uncleared():
            self._say("bad", line)
        shared.remove(self._store.logs)
        return []

    def logs(self, state: ClusterState) -> list[LogPlace]:
        kept, runs = Path(state.shared) / "logs", queue.look_up(state.job).runs if state.job else False
        places = [LogPlace("job", "", Host(""), str(kept / "job"))]
        for node in state.nodes:
            if runs and node.host:
                places.append(LogPlace(node.name, node.folder, state.host_of(node), None))
            else:
                places.append(LogPlace(node.name, "", Host(""), str(kept / node.name)))
        return places

    def _wait_in_queue(self, config: SlurmCluster, state: ClusterState) -> None:
        began, told = time.monotonic(), ""
        while (job := queue.look_up(state.job)).waits:
            waited = time.monotonic() - began
            if waited > config.wait_s:
                what = f"job {job.id} still waits in the queue after {waited:.0f} s: {job.reason}"
                raise ClusterError(f"{what}; nothing is left running: ask for less, or wait longer with wait_s=...")
            if job.reason not in ("None", told):
                told = job.reason
                self._say("ok", f"job {job.id} waits in the queue: {told}")
            self._say("doing", f"job {job.id} waits in the queue: {job.reason}, {waited:.0f} s")
            # Soon at first, then with more patience.
            time.sleep(min(_QUEUE_S, 0.5 + waited / 10))
        self._must_run(state, job)
        self._say("ok", f"job {job.id} runs on {job.nodes} after {time.monotonic() - began:.0f} s")

    def _wait_for_nodes(self, config: SlurmCluster, state: ClusterState) -> None:
        """Wait until every node has reported that it is ready."""
        began, asked, count = time.monotonic(), 0.0, len(state.nodes)
        ready: set[int] = set()
        while len(ready) < count:
            reports = JobFolder(state.shared).reports()
            self._say("doing", f"starting {count - len(ready)} of {count} nodes")
            for index, report in sorted(reports.items()):
                self._check_node(config, report)
                if report.get("ready") and index not in ready and (index == 0 or 0 in ready):
                    ready.add(index)
                    self._record_node(state, index, report)
                    where = f", at {state.address}" if index == 0 else ""
                    text = f"{facts(report['found'])}; up in {time.monotonic() - began:.1f} s{where}"
                    self._say("ok", f"{report['name']}: {text}")
            if time.monotonic() > asked + _QUEUE_S:
                asked = time.monotonic()
                self._must_run(state, queue.look_up(state.job), f": rlctl cluster logs {state.name}")
            if time.monotonic() > began + 2 * config.start_timeout_s + _FILES_S:
                what = f"{count - len(ready)} of {count} nodes of job {state.job} said nothing"
                shared = f"is {state.shared} on a file system that they share? set shared_folder=..."
                raise ClusterError(f"{what}: {shared}")
            time.sleep(_REPORTS_S)

    def _check_node(self, config: SlurmCluster, report: dict[str, Any]) -> None:
        """Raise ClusterError for a node that will not do, or has failed."""
        found, name, bad = report.get("found"), str(report.get("name")), []
        if found is not None:
            # Slurm keeps the clocks together itself: it does not take messages otherwise.
            bad = problems(found, config.min_disk_gib)
        if report.get("why"):
            bad = bad or [f"did not start: {report['why']}"]
        for problem in bad:
            self._say("bad", f"{name}: {problem}")
        if bad:
            logs = f"all it wrote: rlctl cluster logs {self._store.name}"
            raise ClusterError(f"{name} will not do, nothing is left running; {logs}")

    def _record_node(self, state: ClusterState, index: int, report: dict[str, Any]) -> None:
        fields = {name: report[name] for name in ("name", "host", "folder", "address", "pid", "start_id")}
        state.nodes[index] = ClusterNode(**fields, head=index == 0)
        if index == 0:
            state.address = joined(report["address"], report["ports"]["port"])
            state.dashboard = report["ports"]["dashboard-port"] if report["dashboard"] else 0
        self._store.save(state)

    def _must_run(self, state: ClusterState, job: queue.Job, remedy: str = "") -> None:
        if not job.runs:
            words = JobFolder(state.shared).last_words()
            raise ClusterError(job.ending + (f": {words}" if words else "") + f"; nothing is left running{remedy}")

    def _cancel(self, jobs: list[str]) -> list[str]:
        """End jobs and wait until they are over. Returns those that are not."""

        def living(jobs: list[str]) -> list[str]:
            return [job for job in jobs if (found := queue.look_up(job)).runs or found.waits]

        if left := living(jobs):
            self._say("doing", f"cancelling job {', '.join(left)}")
            queue.cancel(left)
        end = time.monotonic() + _STOP_S
        while left and time.monotonic() < end:
            time.sleep(1)
            left = living(left)
        for job in left:
            self._say("bad", f"job {job} has not ended {_STOP_S:g} s after scancel: see `scontrol show job {job}`")
        return [f"job {job}" for job in left]

    def _new_names(self, config: SlurmCluster) -> tuple[str, str]:
        """Return new names of a job and of its shared folder."""
        tag = node_folder_name().rpartition("-")[2]
        name = f"rlctl-{self._store.name}-{tag}"
        if config.shared_folder is None:
            return name, str(self._store.folder / f"job-{tag}")
        return name, str(Path(config.shared_folder).expanduser().absolute() / name)
