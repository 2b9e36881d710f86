"""Watching of a run that a Ray job drives.

If the run's files are on the cluster, they are copied to this machine. The sudden end of a killed driver is recorded.
"""

import base64
import hashlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlctl.cluster.hosts import Host
from rlctl.cluster.jobs.submit import ask
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, try_lock
from rlctl.dashboard.state import RunState, read_state
from rlctl.run.interrupts import stop_driver
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.metrics import METRIC_ROWS
from rlctl.utils.files import write_whole

# Files to copy. Events come last: a reader of the run's end then has all earlier records.
_FILES = ("config.yaml", METRIC_ROWS, "metrics.jsonl", "rollouts.jsonl", "events.jsonl")
_JOB_POLL_S = 5.0
_RETRY_S = 2.0
_SYNC_S = 30.0
# Seconds of silence after which the cluster counts as lost.
_SILENT_S = 120.0


@dataclass(kw_only=True)
class FollowedRun:
    """A watched run."""

    # Reason why the run can no longer be watched, in one line; empty while it can.
    lost: str = ""

    def is_lost(self) -> bool:
        return bool(self.lost)


@dataclass
class ClusterRun(FollowedRun):
    """A watched run on a cluster that is up."""

    run: Path
    record: JobRecord
    state: ClusterState

    @property
    def path(self) -> str:
        """Path of the run directory on the head."""
        return self.record.remote or str(self.run.resolve())

    def ask_status(self) -> None:
        """Make the head look at the job and record the run's end if the driver is gone. Raises ClusterError."""
        ask(self.state, "status", {"job": self.record.job, "run": self.path})

    def follow_in_thread(self, work: Callable[[threading.Event], None], stop: threading.Event) -> None:
        """Call `work`, as the body of a watching thread. If it raises, set `lost` to the error."""
        try:
            work(stop)
        except Exception as error:
            self.lost = f"{self.record.cluster} can no longer be followed: {type(error).__name__}: {error}"

    def watch_job(self, stop: threading.Event) -> None:
        """Ask for the job's status every 5 s until `stop` is set, or until the cluster is silent for too long."""
        last_answer = time.monotonic()
        while not stop.wait(_JOB_POLL_S):
            try:
                self.ask_status()
                last_answer = time.monotonic()
            except ClusterError as error:
                silent_s = time.monotonic() - last_answer
                # A cluster that was taken down on this machine will not answer again.
                if silent_s > _SILENT_S or cluster_of(self.record) is None:
                    self.lost = f"{self.record.cluster} does not answer for {silent_s:.0f} s: {error}"
                    return

    def mirror(self, stop: threading.Event) -> None:
        """Copy the run's files to this machine as they grow, until `stop` is set."""
        while not stop.is_set():
            self.copy(stop, follow=True)
            stop.wait(_RETRY_S)

    def copy(self, stop: threading.Event, follow: bool, deadline: float | None = None) -> None:
        """Copy the run's files to this machine, unless another process is copying them. follow: copy growth too."""
        with suppress(OSError), try_lock(self.run) as is_locked:
            if is_locked:
                copies = {name: (self.run / name).read_bytes() for name in _FILES if (self.run / name).is_file()}
                have = {name: (len(copy), hashlib.sha256(copy).hexdigest()) for name, copy in copies.items()}
                request = {"folder": self.record.remote, "files": _FILES, "have": have, "follow": follow}
                process = self.state.host_of(self.state.head).follow("mirror.run", request, stdout=subprocess.PIPE)
                copy_until(process, self.run, stop, deadline)


def cluster_of(record: JobRecord) -> ClusterState | None:
    """Return the state of the cluster on which a job runs; None if the cluster is not up."""
    with suppress(ClusterError):
        return ClusterStore(record.cluster).load()
    return None


@contextmanager
def follow_run(run: Path) -> Iterator[FollowedRun]:
    """Watch a run in the block: copy its files from the head, and record the sudden end of its driver.

    A run with a damaged job record is not watched. `refresh_open_run` reports the damage.
    """
    record = None
    with suppress(RunDirError):
        record = JobRecord.read(run)
    state = cluster_of(record) if record else None
    if record is None or state is None:
        yield FollowedRun()
        return
    followed = ClusterRun(run, record, state)
    stop = threading.Event()
    targets = [followed.watch_job, followed.mirror] if record.remote else [followed.watch_job]
    threads = [
        threading.Thread(target=followed.follow_in_thread, args=(target, stop), daemon=True) for target in targets
    ]
    for thread in threads:
        thread.start()
    try:
        yield followed
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=_RETRY_S)


def refresh_run(run: Path) -> None:
    """Update a run's directory from its cluster. Do nothing if the cluster cannot be reached."""
    record = JobRecord.read(run)
    if record is None:
        return
    state = cluster_of(record)
    if state is None:
        if record.remote:
            # This copy gets no more events: without this one the run would look active for ever.
            reason = f"cluster {record.cluster} is not up; what is known of it is from before"
            EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=reason, next=[])
        return
    followed = ClusterRun(run, record, state)
    with suppress(ClusterError):
        followed.ask_status()
    if record.remote:
        followed.copy(threading.Event(), follow=False, deadline=time.monotonic() + _SYNC_S)


def refresh_open_run(run: Path) -> str:
    """Update a run that a job drives, unless it has ended. Return why it cannot be read, or an empty text."""
    try:
        # A run that died is read again too: its driver is gone, but the head has not recorded the end yet.
        if (run / "job.json").is_file() and read_state(run).status in ("new", "running", "died"):
            refresh_run(run)
    except RunDirError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or run} cannot be read: {error.strerror}"
    return ""


def stop_run(run: Path, state: RunState) -> bool:
    """Stop a run after its step, or at once if it was asked to stop before. Return True if it is stopped at once.

    Raises ClusterError if the job's cluster does not answer, and NotStopped if no signal reaches a local driver.
    """
    record = JobRecord.read(run)
    at_once = any(event.get("asked_to_stop") is True for event in state.events_of_attempt())
    if record is None:
        # The driver itself stops at once when it gets a second signal.
        stop_driver(run.name, state.start)
        return at_once
    cluster = cluster_of(record)
    if cluster is None:
        raise ClusterError(f"{record.cluster} is not up, and so nothing of it runs")
    ask(cluster, "stop", {"job": record.job, "run": ClusterRun(run, record, cluster).path, "now": at_once})
    return at_once


def show_run_logs(run: Path, process: str | None, node: str | None, follow: bool, lines: int) -> int:
    """Print a run's logs, or those of one process or node, and return the exit code.

    Raises ClusterError if the logs are on a cluster that is not up.
    """
    record = JobRecord.read(run)
    host = Host("")
    folder = str(RunDir(run).logs.resolve())
    if record and record.remote:
        state = cluster_of(record)
        if state is None:
            raise ClusterError(f"{run.name} was on {record.cluster}, which is not up: its logs are in {record.remote}")
        host = state.host_of(state.head)
        folder = f"{record.remote}/logs/latest"
    # `keep` names the folder, so no cluster is needed to find kept logs.
    request = {"folder": folder, "keep": folder, "cluster": "", "node": run.name, "lines": lines, "follow": follow}
    running = host.follow("logs.run", {**request, "suffixes": [".log"], "process": process, "on_node": node})
    try:
        return running.wait()
    finally:
        running.kill()


def copy_until(process: "subprocess.Popen[str]", run: Path, stop: threading.Event, deadline: float | None) -> None:
    """Write the pieces of files that `process` prints into the folder `run`, until the process ends.

    process: `mirror.run` on the head. It is killed when `stop` is set, or at `deadline` (time.monotonic).
    """

    def kill_when_due() -> None:
        while process.poll() is None:
            if stop.wait(0.2) or (deadline is not None and time.monotonic() > deadline):
                process.kill()

    # A thread, because the loop below waits for lines and ends only when the killed process closes its output.
    threading.Thread(target=kill_when_due, daemon=True).start()
    assert process.stdout
    with process.stdout as lines:
        for line in lines:
            # Skip an incomplete line: a connection may break in the middle of one.
            if not (line.startswith("{") and line.endswith("\n")):
                continue
            piece = json.loads(line)
            path = run / piece["file"]
            content = base64.b64decode(piece["data"])
            if piece["first"]:
                write_whole(path, content)
            else:
                with path.open("ab") as file:
                    file.write(content)
    process.wait()
