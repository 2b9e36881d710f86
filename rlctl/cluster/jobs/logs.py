"""`rlctl runs logs`: the ends of the files that a run's processes write, here or on its cluster's head."""

from pathlib import Path

from rlctl.cluster.fleet.hosts import Host
from rlctl.cluster.fleet.state import ClusterError
from rlctl.cluster.jobs.watch import cluster_of
from rlctl.run.job_record import JobRecord
from rlctl.run.run_dir import RunDir


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
