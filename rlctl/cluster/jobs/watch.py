"""Watching a run that a job drives, from anywhere: its files are brought here where they are not, and its end is told
from a driver that is gone."""

import base64
import fcntl
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import Host
from rlctl.cluster.jobs.submit import ask
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore
from rlctl.run.run_dir import JobRecord, RunDir
from rlctl.telemetry.events import EventLog
from rlctl.utils.files import write_whole

# Events last: who reads of a run's end has all that was before it.
_FILES = ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "events.jsonl")
_JOB_POLL_S = 5.0
_AGAIN_S = 2.0
_SYNC_S = 30.0
# A connection may be away for so long.
_SILENT_S = 120.0


def cluster_of(record: JobRecord) -> ClusterState | None:
    """The cluster that a job is of, if it stands."""
    with suppress(ClusterError):
        return ClusterStore(record.cluster).load()
    return None


@dataclass
class FollowedRun:
    """lost: why nothing more is to be heard of the run, in a line; empty while there is."""

    lost: str = ""

    def is_lost(self) -> bool:
        """For who waits."""
        return bool(self.lost)


@contextmanager
def follow_run(run: Path) -> Iterator[FollowedRun]:
    """While the block runs, `run` is kept like the directory on the head, and a driver's sudden end is marked in it."""
    record, following = JobRecord.read(run), FollowedRun()
    state = cluster_of(record) if record else None
    if record is None or state is None:
        yield following
        return
    stop = threading.Event()
    threads = [threading.Thread(target=_watch_job, args=(run, record, state, stop, following), daemon=True)]
    if record.remote:
        threads.append(threading.Thread(target=_mirror, args=(run, record, state, stop), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield following
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=_AGAIN_S)


def refresh_run(run: Path) -> None:
    """What is known of a run on its cluster now; nothing if that cannot be reached."""
    record = JobRecord.read(run)
    if record is None:
        return
    state = cluster_of(record)
    if state is None:
        if record.remote:
            reason = f"cluster {record.cluster} is not up; what is known of it is from before"
            EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=reason, next=[])
        return
    with suppress(ClusterError):
        _ask_status(run, record, state)
    with suppress(OSError):
        if record.remote:
            with _alone(run) as alone:
                if alone:
                    end = time.monotonic() + _SYNC_S
                    _copy_until(_program(run, record, state, follow=False), run, threading.Event(), end)


def stop_job(run: Path, record: JobRecord, now: bool) -> bool:
    """Whether it ran. now: without finishing its step. Raises ClusterError."""
    state = cluster_of(record)
    if state is None:
        raise ClusterError(f"{record.cluster} is not up, and so nothing of it runs")
    request = {"job": record.job, "run": record.remote or str(run.resolve()), "now": now}
    return bool(ask(state, "stop", request)["stopped"])


def show_run_logs(run: Path, process: str | None, follow: bool, lines: int) -> int:
    """Prints them; returns the exit code. Raises ClusterError for a run of a cluster that is not up."""
    record, host, folder = JobRecord.read(run), Host(""), str(RunDir(run).logs.resolve())
    if record and record.remote:
        state = cluster_of(record)
        if state is None:
            raise ClusterError(f"{run.name} was on {record.cluster}, which is not up: its logs are in {record.remote}")
        host, folder = state.host_of(state.head), f"{record.remote}/logs/latest"
    request = {"folder": folder, "keep": folder, "cluster": "", "node": run.name, "lines": lines, "follow": follow}
    running = host.follow("logs", {**request, "suffixes": [".log"], "process": process})
    try:
        return running.wait()
    finally:
        running.kill()


def _watch_job(
    run: Path, record: JobRecord, state: ClusterState, stop: threading.Event, following: FollowedRun
) -> None:
    heard = time.monotonic()
    while not stop.wait(_JOB_POLL_S):
        try:
            _ask_status(run, record, state)
            heard = time.monotonic()
        except ClusterError as error:
            silent = time.monotonic() - heard
            if silent > _SILENT_S or cluster_of(record) is None:
                following.lost = f"{record.cluster} does not answer for {silent:.0f} s: {error}"
                return


def _ask_status(run: Path, record: JobRecord, state: ClusterState) -> dict[str, Any]:
    return ask(state, "status", {"job": record.job, "run": record.remote or str(run.resolve())})


def _mirror(run: Path, record: JobRecord, state: ClusterState, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(OSError), _alone(run) as alone:
            if alone:
                _copy_until(_program(run, record, state, follow=True), run, stop, None)
        stop.wait(_AGAIN_S)


@contextmanager
def _alone(run: Path) -> Iterator[bool]:
    """Whether no other process brings this run's files here; none begins to while the block runs."""
    descriptor = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _program(run: Path, record: JobRecord, state: ClusterState, follow: bool) -> "subprocess.Popen[str]":
    texts = {name: (run / name).read_bytes() for name in _FILES if (run / name).is_file()}
    have = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
    request = {"folder": record.remote, "files": _FILES, "have": have, "follow": follow}
    return state.host_of(state.head).follow("mirror", request, stdout=subprocess.PIPE)


def _copy_until(process: "subprocess.Popen[str]", run: Path, stop: threading.Event, end: float | None) -> None:
    """Write what the head prints until it ends, or `stop` is set, or it is past `end`."""
    watch = threading.Thread(target=_end_with, args=(process, stop, end), daemon=True)
    watch.start()
    assert process.stdout
    with process.stdout as lines:
        for line in lines:
            # A connection that breaks may end in the middle of one.
            if line.startswith("{") and line.endswith("\n"):
                _write(run, json.loads(line))
    process.wait()


def _end_with(process: "subprocess.Popen[str]", stop: threading.Event, end: float | None) -> None:
    while process.poll() is None:
        if stop.wait(0.2) or (end is not None and time.monotonic() > end):
            process.kill()


def _write(run: Path, piece: dict[str, Any]) -> None:
    path, data = run / piece["file"], base64.b64decode(piece["data"])
    if piece["anew"]:
        write_whole(path, data)
        return
    with path.open("ab") as file:
        file.write(data)
