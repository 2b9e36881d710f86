"""Record of a cluster on this machine: one small JSON file in a private folder of the user.

    $XDG_STATE_HOME/rlctl/clusters/NAME/   (0700; ~/.local/state without XDG_STATE_HOME)
        state.json   while the cluster is up
        token        while the cluster is up (0600)
        logs/NODE/   of the last time

The file is written before anything starts, with the folder that each node will get, and again after every change. So
the next rlctl can stop all nodes that were started, however the previous one ended.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import Host, pod_host, slurm_host, ssh_host
from rlctl.config.errors import UserError, did_you_mean
from rlctl.utils.ray_token import new_token, read_token, token_digest, write_token

_VERSION = 2


class ClusterError(UserError):
    """A command on a cluster failed. The message is one line with the remedy."""

    exit_code = 1


class NoSuchCluster(ClusterError):
    """There is no cluster with this name. The exit code is that of bad input."""

    exit_code = 2


@dataclass
class ClusterNode:
    """A Ray node."""

    name: str
    # Host name for ssh, Slurm or kubectl; empty for this machine.
    host: str
    # Folder of the node's files on its host. It is created when the node starts.
    folder: str
    head: bool
    # Address of the node in Ray.
    address: str
    # Pid of the node's first process; 0 until it is started. start_id: identifies the process, see `utils.process`.
    pid: int = 0
    # Empty for a node started by an earlier version of rlctl.
    start_id: str = ""

    @property
    def process(self) -> dict[str, Any]:
        """Fields that identify the node's first process in requests to `remote_scripts/`."""
        return {"folder": self.folder, "pid": self.pid, "start_id": self.start_id}


@dataclass
class ClusterState:
    """Record of a cluster that is starting, up or stopping."""

    name: str
    kind: str
    # starting, up or stopping.
    phase: str
    python: str
    # SHA-256 digest of the token with which the nodes were started.
    token_sha256: str
    listen_on_all: bool
    created: float
    ssh_options: list[str] = field(default_factory=list)
    connect_timeout_s: int = 0
    # host:port of the head; empty until it is up.
    address: str = ""
    # Port of dashboard and job API on the head's loopback; 0: there is none.
    dashboard: int = 0
    # Folder for runs on the cluster's file system; empty if the cluster shares this machine's files.
    storage: str = ""
    # Environment variables for a driver, without address and token.
    environment: dict[str, str] = field(default_factory=dict)
    # Slurm: id of the job (empty until it is submitted), its name, and the folder that all nodes share.
    job: str = ""
    job_name: str = ""
    shared: str = ""
    setup: list[str] = field(default_factory=list)
    # Kubernetes: context and namespace; empty: kubectl's default.
    context: str = ""
    namespace: str = ""
    nodes: list[ClusterNode] = field(default_factory=list)
    # Config of the cluster, used when lost nodes are restarted.
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> ClusterNode:
        return next(node for node in self.nodes if node.head)

    @property
    def head_first(self) -> list[ClusterNode]:
        return sorted(self.nodes, key=lambda node: not node.head)

    def host_of(self, node: ClusterNode) -> Host:
        """Return the host of a node, on which programs of `remote_scripts/` can be run."""
        if not node.host:
            return Host("")
        if self.kind == "slurm":
            return slurm_host(node.host, self.python, self.job, self.setup)
        if self.kind == "kubernetes":
            return pod_host(node.host, self.python, self.context, self.namespace)
        return ssh_host(node.host, self.python, self.connect_timeout_s, self.ssh_options)


def clusters_folder() -> Path:
    """Return the folder of all clusters."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "rlctl" / "clusters"


class ClusterStore:
    """Folder of one cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = clusters_folder() / name
        self.token_path = self.folder / "token"
        self.logs = self.folder / "logs"
        self._file = self.folder / "state.json"

    def load(self) -> ClusterState | None:
        """Read the state from the file; None if there is no cluster. Raises ClusterError if the file cannot be used."""
        try:
            fields = json.loads(self._file.read_text(encoding="utf-8"))
            version = fields.pop("version")
            if version == 1:
                # Version 1 had the wall-clock time of a node's start, which is not used now.
                for node in fields["nodes"]:
                    node.pop("create_time")
            elif version != _VERSION:
                raise ClusterError(f"{self._file} is of another version of rlctl: stop the cluster with that one")
            nodes = [ClusterNode(**node) for node in fields["nodes"]]
            return ClusterState(**{**fields, "nodes": nodes})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"{self._file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ClusterError(f"{self._file} is damaged: end its Ray processes by hand, then remove it") from None

    def save(self, state: ClusterState) -> None:
        """Write the state to the file atomically."""
        self._make_folder()
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(state)}, indent=1), encoding="utf-8")
        temporary.replace(self._file)

    def new_token(self) -> str:
        """Write a new token to its file and return its digest."""
        return self.keep_token(new_token())

    def keep_token(self, token: str) -> str:
        """Write a token to its file and return its digest."""
        self._make_folder()
        return write_token(self.token_path, token)

    def token(self) -> str:
        """Read the token from its file."""
        return read_token(self.token_path)

    def check_token(self, state: ClusterState) -> None:
        """Raise ClusterError unless the token file exists, is private, and has the token with which the cluster was
        started.
        """
        restart = f"restart it: rlctl cluster down {self.name} && rlctl cluster up"
        try:
            mode = self.token_path.stat().st_mode
            token = self.token()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ClusterError(f"token {self.token_path} cannot be read: {reason}; mend it, or {restart}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ClusterError(f"token {self.token_path} is open to other users: chmod 600 it, or {restart}")
        if token_digest(token) != state.token_sha256:
            raise ClusterError(f"wrong token: {self.token_path} is not what {self.name} was started with; {restart}")

    def keep_logs_of(self, names: list[str]) -> None:
        """Remove the logs of all nodes that are not in `names`. They are from an earlier cluster with this name."""
        for path in self.logs.iterdir() if self.logs.is_dir() else ():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Remove all files of a cluster that is down, except its logs."""
        for path in (self._file, self._file.with_suffix(".tmp")):
            path.unlink(missing_ok=True)
        if self.token_path.is_dir():
            shutil.rmtree(self.token_path)
        self.token_path.unlink(missing_ok=True)
        if not self.logs.exists() or not any(self.logs.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the cluster's lock in the block, so that one command at a time changes it. Raises ClusterError if it is
        taken.
        """
        self._make_folder()
        with try_lock(self.folder) as is_locked:
            if not is_locked:
                problem = f"another rlctl is starting or stopping {self.name}"
                raise ClusterError(f"{problem}: wait for it to end, or interrupt it")
            yield

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.parent.chmod(0o700)
            self.folder.chmod(0o700)
        except OSError as error:
            problem = f"{self.folder} cannot be made: {error.strerror}"
            raise ClusterError(f"{problem}; set XDG_STATE_HOME to a folder of yours") from None


@contextlib.contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Take the lock of a folder for the block, and yield True. Yield False if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def known_clusters() -> list[str]:
    """Return the names of clusters that are up or have logs."""
    folder = clusters_folder()
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def running_clusters() -> list[str]:
    """Return the names of clusters with a state file."""
    return [name for name in known_clusters() if (clusters_folder() / name / "state.json").is_file()]


def not_up(name: str) -> str:
    """Return the message for a name if no cluster with this name is up."""
    names = running_clusters()
    hint = did_you_mean(name, names) or (f"; there are {', '.join(names)}" if names else "")
    return f"no cluster {name} is up{hint}"


def node_folder_name() -> str:
    """Return a new name for a node's folder on its host. It is short, because Ray puts Unix sockets in this folder."""
    return f"rlctl-{secrets.token_hex(4)}"
