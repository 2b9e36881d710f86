"""What rlctl remembers of a cluster: one small JSON file in a folder of the user's own.

    $XDG_STATE_HOME/rlctl/clusters/NAME/   (0700; ~/.local/state without XDG_STATE_HOME)
        state.json   while the cluster stands
        token        while the cluster stands (0600)
        logs/NODE/   of the last time

The file is written before anything starts, each node with the folder that it will get, and after every change: who
finds it, after whatever end, can stop all that was started.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import Host
from rlctl.cluster.links import pod_host, slurm_host, ssh_host

_VERSION = 1


class ClusterError(Exception):
    """What keeps a command from its work, in one line that says what to do next."""


class NoSuchCluster(ClusterError):
    """There is no cluster of this name: bad input rather than a failure."""


@dataclass
class ClusterNode:
    """A Ray node. host: as ssh or Slurm takes it, empty: this machine. folder: of its files there, made when it starts.

    pid, create_time (unix seconds): of its first process, 0 until it is started. address: of the node in Ray.
    """

    name: str
    host: str
    folder: str
    head: bool
    address: str
    pid: int = 0
    create_time: float = 0.0


@dataclass
class ClusterState:
    """A cluster that stands, or is being started (`phase`). address: of the head, host:port, empty until it is up.

    dashboard: its port on the head's loopback, 0: none. token_sha256: of the token that the nodes were started with.
    ssh_options, connect_timeout_s, setup, storage: as in the config; without storage its files are this machine's.
    config: all of it, for nodes that are started anew. environment: what a driver needs beside address and token.
    job, job_name: in Slurm, job empty until it is submitted. shared: the folder that all its nodes see.
    context, namespace: in Kubernetes, empty for kubectl's own.
    """

    name: str
    kind: str
    phase: str
    python: str
    token_sha256: str
    listen_on_all: bool
    created: float
    ssh_options: list[str] = field(default_factory=list)
    connect_timeout_s: int = 0
    address: str = ""
    dashboard: int = 0
    storage: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    job: str = ""
    job_name: str = ""
    shared: str = ""
    setup: list[str] = field(default_factory=list)
    context: str = ""
    namespace: str = ""
    nodes: list[ClusterNode] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> ClusterNode:
        return next(node for node in self.nodes if node.head)

    def host_of(self, node: ClusterNode) -> Host:
        """Where a node runs, to run programs of `remote_scripts/` there."""
        if not node.host:
            return Host("")
        if self.kind == "slurm":
            return slurm_host(node.host, self.python, self.job, self.setup)
        if self.kind == "kubernetes":
            return pod_host(node.host, self.python, self.context, self.namespace)
        return ssh_host(node.host, self.python, self.connect_timeout_s, self.ssh_options)


def clusters_folder() -> Path:
    """The folder of all clusters."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "rlctl" / "clusters"


class ClusterStore:
    """The folder of one cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = clusters_folder() / name
        self.token_path = self.folder / "token"
        self.logs = self.folder / "logs"
        self._file = self.folder / "state.json"

    def load(self) -> ClusterState | None:
        """What is known; None where no cluster stands. Raises ClusterError for a file that is not ours."""
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
            if data.pop("version") != _VERSION:
                raise ClusterError(f"{self._file} is of another version of rlctl: stop the cluster with that one")
            return ClusterState(**{**data, "nodes": [ClusterNode(**node) for node in data["nodes"]]})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"{self._file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ClusterError(f"{self._file} is damaged: end its Ray processes by hand, then remove it") from None

    def save(self, state: ClusterState) -> None:
        """Whole or not at all."""
        self._make()
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(state)}, indent=1), encoding="utf-8")
        temporary.replace(self._file)

    def new_token(self) -> tuple[str, str]:
        """A token, written to its file, and its digest."""
        token = secrets.token_hex(32)
        return token, self.keep_token(token)

    def keep_token(self, token: str) -> str:
        """Writes a token to its file and returns its digest."""
        self._make()
        self.token_path.unlink(missing_ok=True)
        with os.fdopen(os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        return _digest(token)

    def check_token(self, state: ClusterState) -> None:
        """Raises ClusterError unless the token file is there, private and the one the cluster was started with."""
        mend = f"restart it: rlctl cluster down {self.name} && rlctl cluster up"
        try:
            mode, token = self.token_path.stat().st_mode, self.token_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ClusterError(f"token {self.token_path} cannot be read: {reason}; mend it, or {mend}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ClusterError(f"token {self.token_path} is open to other users: chmod 600 it, or {mend}")
        if _digest(token.strip()) != state.token_sha256:
            raise ClusterError(f"wrong token: {self.token_path} is not what {self.name} was started with; {mend}")

    def keep_logs_of(self, names: list[str]) -> None:
        """What other nodes left, of an earlier cluster of this name, explains nothing any more."""
        for path in self.logs.iterdir() if self.logs.is_dir() else ():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Nothing stands any more: all is removed but logs."""
        for path in (self._file, self._file.with_suffix(".tmp")):
            path.unlink(missing_ok=True)
        if self.token_path.is_dir():
            shutil.rmtree(self.token_path)
        self.token_path.unlink(missing_ok=True)
        if not self.logs.exists() or not any(self.logs.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One command at a time changes a cluster. Raises ClusterError while another is at it."""
        self._make()
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                what = f"another rlctl is starting or stopping {self.name}: wait for it to end, or interrupt it"
                raise ClusterError(what) from None
            yield
        finally:
            os.close(descriptor)

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.parent.chmod(0o700)
            self.folder.chmod(0o700)
        except OSError as error:
            what = f"{self.folder} cannot be made: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
            raise ClusterError(what) from None


def known_clusters() -> list[str]:
    """Names of the clusters that stand, or whose logs are kept."""
    folder = clusters_folder()
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def running_clusters() -> list[str]:
    """Names of the clusters that have a state file."""
    return [name for name in known_clusters() if (clusters_folder() / name / "state.json").is_file()]


def folder_name() -> str:
    """Of a node's files on its host: short, since Ray puts Unix sockets below it, and nobody's yet."""
    return f"rlctl-{secrets.token_hex(4)}"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
