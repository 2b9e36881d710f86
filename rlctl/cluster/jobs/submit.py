"""Submission of a run to a cluster (`rlctl train --cluster`) as a Ray job. The job's driver runs on the head."""

import os
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import yaml

from rlctl.cluster.hosts import HostError
from rlctl.cluster.jobs.upload import named_files, pack, portable
from rlctl.cluster.launcher import ClusterStatus
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster, not_up
from rlctl.cluster.status import cluster_status
from rlctl.config.errors import ConfigError, Problem
from rlctl.preflight.placement import NodeResources
from rlctl.run.run_dir import JobRecord, RunDir

_ANSWER_S = 120.0
# Keys of `head_agent.OPERATIONS`.
Operation = Literal["accept", "status", "stop", "runs"]


@dataclass(frozen=True)
class TargetCluster:
    """A cluster that accepts runs, with its current status."""

    state: ClusterState
    status: ClusterStatus

    @property
    def away(self) -> bool:
        """True if the cluster does not share this machine's files."""
        return bool(self.state.storage)

    def free_resources(self) -> list[NodeResources]:
        """Return the free resources of the cluster's nodes."""
        return [NodeResources.from_free(node.node.name, node.free) for node in self.status.nodes if node.in_ray]

    @property
    def gpus(self) -> int:
        """Number of all GPUs, free or not."""
        return int(sum(node.total.get("GPU", 0) for node in self.status.nodes))

    @property
    def device_memory(self) -> int | None:
        """Bytes of the smallest GPU, or of the smallest host's memory without GPUs; None if no host answered."""
        gpu_bytes = []
        for node in self.status.nodes:
            gpu_bytes += [int(gpu["memory_mib"]) << 20 for gpu in node.facts.get("gpus", [])]
        if gpu_bytes:
            return min(gpu_bytes)
        return min((node.facts["memory"] for node in self.status.nodes if node.facts), default=None)


def find_cluster(name: str) -> TargetCluster:
    """Find a cluster by its name. Raises ClusterError unless it is up and accepts jobs."""
    store = ClusterStore(name)
    state = store.load() if store.folder.is_dir() else None
    if state is None or state.phase != "up":
        raise NoSuchCluster(f"{not_up(name)}; start it: rlctl cluster up {name}")
    status = cluster_status(state)
    if not status.head_alive:
        raise ClusterError(f"{name} is not up: {'; '.join(status.warnings) or status.condition}")
    if not state.dashboard:
        remedy = f"pip install 'ray[default]' there, then rlctl cluster down {name} and up"
        raise ClusterError(f"{name} takes no jobs, its head has no job server: {remedy}")
    return TargetCluster(state, status)


@dataclass(frozen=True)
class Submission:
    """A run to be submitted."""

    # Resolved config, as plain values.
    config: dict[str, Any]
    # Directory on this machine of the run to resume; None for a new run.
    resume: Path | None
    # Names of environment variables whose values are sent to the driver.
    secrets: list[str]
    # Flags of `rlctl.cli.job`.
    flags: list[str]
    # Folder of the shipped recipes. The cluster has these files too.
    recipes: Path


def submit(target: TargetCluster, order: Submission) -> Path:
    """Submit a run. Return its run directory on this machine, which is a copy if the cluster has its own files.

    Raises ClusterError, and ConfigError for problems on the head.
    """
    config = order.config
    resume = order.resume
    working_directory = Path.cwd()
    state = target.state
    if absent := [name for name in order.secrets if name not in os.environ]:
        raise ConfigError([Problem(f"--env {name}", "", "not set in this environment") for name in absent])
    # Path on the head of the run to resume: recorded when it was submitted, or the path here if files are shared.
    resumed_path = None
    if resume is not None:
        earlier_job = JobRecord.read(resume)
        resumed_path = (earlier_job and earlier_job.remote) or str(resume.resolve())
    request = {
        "cluster": state.name,
        "resume": resumed_path,
        "work": str(working_directory),
        "files": None,
        "storage": None,
        "called": None,
        "secrets": {name: os.environ[name] for name in order.secrets},
        "flags": order.flags,
    }
    if target.away:
        request |= {
            "work": f"{state.storage}/work/{working_directory.name}-{token_hex(3)}",
            "files": pack(working_directory, named_files(config, working_directory)),
            "storage": state.storage,
            "called": str(resume.parent if resume else config["run"]["dir"]),
        }
    sent_config = portable(config, [working_directory, order.recipes]) if target.away else config
    request["config"] = yaml.safe_dump(sent_config, sort_keys=False)
    reply = ask(state, "accept", request)
    if "problems" in reply:
        raise ConfigError([Problem(f"on {state.head.name}", "", line) for line in reply["problems"]])
    if not target.away:
        return Path(reply["run"])
    run = resume
    if run is None:
        # The directory here will be a copy. The head's name may be taken here, so try others; the job's name is unique.
        root = Path(config["run"]["dir"])
        remote_name = Path(reply["run"]).name
        candidates = (remote_name, f"{remote_name}--{state.name}", f"{remote_name}--{reply['job']}")
        run = RunDir.create(next(name for name in candidates if not (root / name).exists()), root).path
    record = JobRecord(
        cluster=state.name,
        job=reply["job"],
        work=str(request["work"]),
        attempt=reply["attempt"],
        remote=reply["run"],
    )
    record.write(run)
    return run


def ask(state: ClusterState, operation: Operation, request: dict[str, Any]) -> dict[str, Any]:
    """Call an operation of `head_agent.py` on the head and return the reply. Raises ClusterError."""
    common = {"op": operation, "dashboard": state.dashboard, "token_path": f"{state.head.folder}/token"}
    try:
        return state.host_of(state.head).run("head.job", {**common, **request}, _ANSWER_S)
    except HostError as error:
        raise ClusterError(f"head {state.head.name}: {error}") from None
