"""`rlctl train --cluster`: hands a run to a cluster as a Ray job, whose driver works on the head."""

import os
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from rlctl.cluster.down import not_up
from rlctl.cluster.hosts import HostError
from rlctl.cluster.jobs.upload import pack, portable
from rlctl.cluster.launcher import ClusterStatus
from rlctl.cluster.state import ClusterError, ClusterState, ClusterStore, NoSuchCluster
from rlctl.cluster.status import look
from rlctl.config.errors import ConfigError, Problem
from rlctl.preflight.placement import NodeResources
from rlctl.run.run_dir import JobRecord, RunDir

_ACCEPT_S = 120.0


@dataclass(frozen=True)
class TargetCluster:
    """A cluster that runs can be handed to, as it is now."""

    store: ClusterStore
    state: ClusterState
    seen: ClusterStatus

    @property
    def away(self) -> bool:
        """Whether its files are not this machine's."""
        return bool(self.state.storage)

    def rooms(self) -> list[NodeResources]:
        """What its nodes have free."""
        return [NodeResources.of(each.node.name, each.free) for each in self.seen.nodes if each.in_ray]

    @property
    def gpus(self) -> int:
        """GPUs in all, free or not."""
        return int(sum(each.total.get("GPU", 0) for each in self.seen.nodes))

    @property
    def device_memory(self) -> int | None:
        """Bytes of the smallest device; None where nobody said."""
        sizes = [int(gpu["memory_mib"]) << 20 for each in self.seen.nodes for gpu in each.facts.get("gpus", [])]
        memories = sizes or [each.facts["memory"] for each in self.seen.nodes if each.facts]
        return min(memories, default=None)


def find_cluster(name: str) -> TargetCluster:
    """Raises ClusterError unless the cluster stands and takes jobs."""
    store = ClusterStore(name)
    state = store.load() if store.folder.is_dir() else None
    if state is None or state.phase != "up":
        raise NoSuchCluster(f"{not_up(name)}; start it: rlctl cluster up {name}")
    seen = look(store, state)
    if not seen.head_alive:
        raise ClusterError(f"{name} is not up: {'; '.join(seen.warnings) or seen.condition}")
    if not state.dashboard:
        mend = f"pip install 'ray[default]' there, then rlctl cluster down {name} and up"
        raise ClusterError(f"{name} takes no jobs, its head has no job server: {mend}")
    return TargetCluster(store, state, seen)


@dataclass(frozen=True)
class Submission:
    """A run that is to be handed over. config: resolved, as plain values. resume: a run directory here, or None.

    secrets: names of environment variables whose values the driver is to have. flags: of `rlctl.cli.job`. recipes: the
    folder of shipped ones, which a cluster has too.
    """

    config: dict[str, Any]
    resume: Path | None
    secrets: list[str]
    flags: list[str]
    recipes: Path


def submit(target: TargetCluster, order: Submission) -> Path:
    """Returns the run directory to be watched. Raises ClusterError, and ConfigError for what is wrong on the head."""
    config, resume = order.config, order.resume
    home, state = Path.cwd(), target.state
    files = pack(home, _below(config, home)) if target.away else None
    work = f"{state.storage}/work/{home.name}-{token_hex(3)}" if target.away else str(home)
    request = {
        "cluster": state.name,
        "config": yaml.safe_dump(portable(config, [home, order.recipes]) if target.away else config, sort_keys=False),
        "resume": None if resume is None else _there(resume),
        "work": work,
        "files": files,
        "storage": state.storage or None,
        "called": _called(config, resume) if target.away else None,
        "secrets": _values(order.secrets),
        "flags": order.flags,
    }
    reply = ask(state, "accept", request)
    if "problems" in reply:
        raise ConfigError([Problem(f"on {state.head.name}", "", line) for line in reply["problems"]])
    record = JobRecord(state.name, reply["job"], work, reply["attempt"], reply["run"])
    return _copy(record, Path(config["run"]["dir"]), resume) if target.away else Path(reply["run"])


def ask(state: ClusterState, operation: str, request: dict[str, Any], deadline_s: float = _ACCEPT_S) -> dict[str, Any]:
    """What the head says to an operation of jobs/head.py. Raises ClusterError."""
    common = {"op": operation, "dashboard": state.dashboard, "token_path": f"{state.head.folder}/token"}
    try:
        return state.host_of(state.head).run("job", {**common, **request}, deadline_s)
    except HostError as error:
        what = str(error)
        if "No module named 'rlctl'" in what:
            what = f"rlctl is not installed for {state.python}: install it there, or set python=..."
        raise ClusterError(f"head {state.head.name}: {what}") from None


def _copy(record: JobRecord, root: Path, resume: Path | None) -> Path:
    """A directory here that is to be a copy of the run's."""
    assert record.remote is not None
    name = Path(record.remote).name
    # Names that are free there may be in use here; a job's is nobody else's.
    names = (name, f"{name}--{record.cluster}", f"{name}--{record.job}")
    run = resume or RunDir.create(next(each for each in names if not (root / each).exists()), root).path
    record.write(run)
    return run


def _there(resume: Path) -> str:
    record = JobRecord.read(resume)
    return record.remote if record and record.remote else str(resume.resolve())


def _called(config: dict[str, Any], resume: Path | None) -> str:
    return str(config["run"]["dir"]) if resume is None else str(resume.parent)


def _values(names: list[str]) -> dict[str, str]:
    if absent := [name for name in names if name not in os.environ]:
        raise ConfigError([Problem(f"--env {name}", "", "not set in this environment") for name in absent])
    return {name: os.environ[name] for name in names}


def _below(value: Any, home: Path) -> list[Path]:
    """Paths of the config below the working directory."""
    if isinstance(value, dict):
        return [path for each in value.values() for path in _below(each, home)]
    if isinstance(value, list):
        return [path for each in value for path in _below(each, home)]
    if isinstance(value, str) and value.startswith(f"{home}/"):
        path = Path(value.partition(":")[0])
        return [path] if path.exists() else []
    return []
