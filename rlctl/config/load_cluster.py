"""`load_cluster`: from a name or a file to a checked cluster config, or every problem at once."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.builtin import CONFIGS, find
from rlctl.config.cluster_schema import CLUSTER_KINDS, OWN_PORTS, ClusterConfig, HostCluster, SlurmCluster, SshCluster
from rlctl.config.compose import compose
from rlctl.config.convert import Converter
from rlctl.config.errors import BrokenValueError, ConfigError, Problem, did_you_mean
from rlctl.config.provenance import ConfigNode, leaves, show_path

FOLDER = CONFIGS / "cluster"
# Workers' ports besides Ray's own: one for each worker, and a driver's.
_WORKER_PORTS = 16
# A name that begins with a dash would be an option to ssh.
_HOST = re.compile(r"[^\s/-][^\s/]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
# Kubernetes makes further names from it, of at most 63 letters.
_POD_NAME = re.compile(r"[a-z]([a-z0-9-]{0,39}[a-z0-9])?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)((?:[KMGTP]i)|[kMGTP]|)")
_EFFECTS = "NoSchedule, PreferNoSchedule or NoExecute"
# Key of a list -> pattern of each entry, and the pattern in words.
_ENTRIES = {
    "sbatch_options": (r"-[^\n]*", "one option of sbatch, with its dash"),
    "volume_claims": (r"[^:/\s]+:/\S+", "claim:/path"),
    "node_selector": (r"[^=\s]+=[^=\s]*", "label=value"),
    "tolerations": (
        r"[^=:\s]+(=[^=:\s]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        f"key, key=value, or either with :Effect ({_EFFECTS})",
    ),
}


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "base")


def load_cluster(cluster: str, overrides: list[str]) -> ClusterConfig:
    """Return the config of `cluster`, a shipped name or a YAML file, `name` filled in. Raises ConfigError."""
    file = find_cluster(cluster)
    root = compose(file, overrides)
    assert isinstance(root.value, dict)
    stated = root.value.get("kind")
    if stated is None or not isinstance(stated.value, str) or stated.value not in CLUSTER_KINDS:
        where = str(stated.origin) if stated else show_path(file)
        what = f"must be one of {', '.join(CLUSTER_KINDS)}: inherit it, such as `defaults: cluster/local.yaml`"
        raise ConfigError([Problem(where, "kind", what)])
    parents = (f"cluster/{stated.value}.yaml",)
    converter = Converter(CLUSTER_KINDS[stated.value], show_path(file), CLUSTER_KINDS.values(), parents)
    config: ClusterConfig = converter.convert(root)
    if config.name is None:
        config.name = file.stem
    if problems := [*converter.problems, *_cluster_problems(config, root, file)]:
        raise ConfigError(problems)
    return config


def find_cluster(cluster: str) -> Path:
    """Return the file that a person means: a shipped name, or a path with or without .yaml. Raises ConfigError."""
    if "/" not in cluster and (FOLDER / f"{cluster}.yaml").is_file() and not Path(cluster).is_file():
        return FOLDER / f"{cluster}.yaml"
    path = Path(cluster).expanduser()
    for candidate in (path, path.with_name(f"{path.name}.yaml")):
        if candidate.is_file():
            return candidate.resolve()
    found = find(cluster, FOLDER)
    if found is not None and found.is_relative_to(FOLDER):
        return found
    hint = did_you_mean(path.stem, cluster_names()) or f"; shipped are {', '.join(cluster_names())}"
    raise ConfigError([Problem(cluster, "", f"no such cluster or file{hint}")])


def _cluster_problems(config: ClusterConfig, root: ConfigNode, file: Path) -> Iterator[Problem]:
    """Yield the problems that a type cannot say. A check that needs a value already found wrong is left out."""
    origins = {key: str(node.origin) for key, node in leaves(root)}
    for key, check in _CHECKS.items():
        try:
            what = check(config)
        except (BrokenValueError, AttributeError):
            continue
        if what:
            where = next((at for name, at in origins.items() if name == key or name.startswith(f"{key}.")), "")
            yield Problem(where or show_path(file), key, what)


def _cluster_name(config: ClusterConfig) -> str | None:
    if config.kind == "kubernetes":
        pattern, what = _POD_NAME, "small letters, digits and dashes, from a letter on, at most 41"
    else:
        pattern, what = _NAME, "letters, digits, dots, dashes and underscores, at most 41"
    return None if pattern.fullmatch(str(config.name)) else f"must be {what}, not {config.name!r}"


def _dashboard(config: HostCluster) -> str | None:
    return "must differ from port" if config.port == config.dashboard_port != 0 else None


def _hosts(config: SshCluster) -> str | None:
    if not config.hosts:
        return "must name at least one host"
    if odd := [host for host in config.hosts if not _HOST.fullmatch(host)]:
        return f"not a host name: {odd[0]!r}"
    twice = sorted({host for host in config.hosts if config.hosts.count(host) > 1})
    return f"{', '.join(twice)} named twice" if twice else None


def _min_hosts(config: SshCluster) -> str | None:
    if config.min_hosts is not None and config.min_hosts > len(config.hosts):
        return f"must be at most {len(config.hosts)}, the number of hosts, not {config.min_hosts}"
    return None


def _other_ports(config: SshCluster | SlurmCluster) -> str | None:
    if config.other_ports is None:
        return None
    needed = len(OWN_PORTS) + _WORKER_PORTS
    if len(config.other_ports) != 2 or config.other_ports[1] - config.other_ports[0] + 1 < needed:
        return f"must be [first, last] with room for {needed} ports or more, not {config.other_ports}"
    low, high = config.other_ports
    inside = [port for port in (config.port, config.dashboard_port) if low <= port <= high]
    return f"must leave out port {inside[0]}, the head's" if inside else None


def _entries(key: str, config: ClusterConfig) -> str | None:
    pattern, what = _ENTRIES[key]
    odd = [entry for entry in getattr(config, key) if not re.fullmatch(pattern, entry)]
    return f"each must be {what}, not {odd[0]!r}" if odd else None


def _fits(key: str, limit: str, config: ClusterConfig) -> str | None:
    """Check that shared memory is less than all memory."""
    amounts = []
    for text in (getattr(config, key), getattr(config, limit)):
        quantity = _QUANTITY.fullmatch(text)
        if quantity is None:
            return f"not an amount as Kubernetes takes it, such as 64Gi: {text!r}"
        number, unit = quantity.groups()
        factor = 1024 if unit.endswith("i") else 1000
        amounts.append(float(number) * factor ** " KMGTP".index(unit[:1].upper() or " "))
    if amounts[0] >= amounts[1]:
        return f"must be less than {limit}, of which it is a part, {getattr(config, limit)}, not {getattr(config, key)}"
    return None


_CHECKS: dict[str, Any] = {
    "name": _cluster_name,
    "dashboard_port": _dashboard,
    "hosts": _hosts,
    "min_hosts": _min_hosts,
    "other_ports": _other_ports,
    **{key: partial(_entries, key) for key in _ENTRIES},
    "shm": partial(_fits, "shm", "memory"),
    "head_shm": partial(_fits, "head_shm", "head_memory"),
}
