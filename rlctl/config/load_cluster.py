"""Loading of cluster configs. `load_cluster` composes, types and checks one, and raises all of its problems at once."""

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
# Least number of ports for workers and drivers in `other_ports`, besides Ray's own. Each worker and driver needs one.
_WORKER_PORTS = 16
# A host name must not begin with a dash, because ssh would read an option.
_HOST = re.compile(r"[^\s/-][^\s/]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
# Kubernetes builds longer names from a cluster's name, and these may have at most 63 letters.
_POD_NAME = re.compile(r"[a-z]([a-z0-9-]{0,39}[a-z0-9])?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)((?:[KMGTP]i)|[kMGTP]|)")
_EFFECTS = "NoSchedule, PreferNoSchedule or NoExecute"
# Key of a list -> (pattern of each entry, description of the pattern).
_LIST_FORMS = {
    "sbatch_options": (r"-[^\n]*", "one option of sbatch, with its dash"),
    "volume_claims": (r"[^:/\s]+:/\S+", "claim:/path"),
    "node_selector": (r"[^=\s]+=[^=\s]*", "label=value"),
    "tolerations": (
        r"[^=:\s]+(=[^=:\s]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        f"key, key=value, or either with :Effect ({_EFFECTS})",
    ),
}


def cluster_names() -> list[str]:
    """Return the names of the shipped cluster configs."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "base")


def load_cluster(cluster: str, overrides: list[str]) -> ClusterConfig:
    """Load the config of `cluster`, a shipped name or a YAML file. A null `name` becomes the file's. Raises
    ConfigError.
    """
    file = find_cluster(cluster)
    root = compose(file, overrides)
    assert isinstance(root.value, dict)
    kind = root.value.get("kind")
    if kind is None or not isinstance(kind.value, str) or kind.value not in CLUSTER_KINDS:
        where = str(kind.origin) if kind else show_path(file)
        mistake = f"must be one of {', '.join(CLUSTER_KINDS)}: inherit it, such as `defaults: cluster/local.yaml`"
        raise ConfigError([Problem(where, "kind", mistake)])
    parents = (f"cluster/{kind.value}.yaml",)
    converter = Converter(CLUSTER_KINDS[kind.value], show_path(file), CLUSTER_KINDS.values(), parents)
    config: ClusterConfig = converter.convert(root)
    if config.name is None:
        config.name = file.stem
    problems = converter.problems + list(_check_cluster(config, root, file))
    if problems:
        raise ConfigError(problems)
    return config


def find_cluster(cluster: str) -> Path:
    """Return the file for `cluster`: a shipped name, or a path with or without .yaml. Raises ConfigError."""
    if "/" not in cluster and (FOLDER / f"{cluster}.yaml").is_file() and not Path(cluster).is_file():
        return FOLDER / f"{cluster}.yaml"
    path = Path(cluster).expanduser()
    for candidate in (path, path.with_name(f"{path.name}.yaml")):
        if candidate.is_file():
            return candidate.resolve()
    shipped_file = find(cluster, FOLDER)
    if shipped_file is not None and shipped_file.is_relative_to(FOLDER):
        return shipped_file
    hint = did_you_mean(path.stem, cluster_names()) or f"; shipped are {', '.join(cluster_names())}"
    raise ConfigError([Problem(cluster, "", f"no such cluster or file{hint}")])


def _check_cluster(config: ClusterConfig, root: ConfigNode, file: Path) -> Iterator[Problem]:
    """Yield the problems that types cannot express. A check that reads a wrong value is skipped."""
    origins = {key: str(node.origin) for key, node in leaves(root)}
    for key, check in _CHECKS.items():
        try:
            mistake = check(config)
        except (BrokenValueError, AttributeError):
            # The value is reported already, or this kind of cluster does not have the key.
            continue
        if mistake:
            key_origins = [origin for name, origin in origins.items() if name == key or name.startswith(f"{key}.")]
            where = key_origins[0] if key_origins else ""
            yield Problem(where or show_path(file), key, mistake)


def _check_name(config: ClusterConfig) -> str | None:
    pattern = _NAME
    letters = "letters, digits, dots, dashes and underscores, at most 41"
    if config.kind == "kubernetes":
        pattern = _POD_NAME
        letters = "small letters, digits and dashes, from a letter on, at most 41"
    return None if pattern.fullmatch(str(config.name)) else f"must be {letters}, not {config.name!r}"


def _check_dashboard_port(config: HostCluster) -> str | None:
    return "must differ from port" if config.port == config.dashboard_port != 0 else None


def _check_hosts(config: SshCluster) -> str | None:
    if not config.hosts:
        return "must name at least one host"
    if odd_hosts := [host for host in config.hosts if not _HOST.fullmatch(host)]:
        return f"not a host name: {odd_hosts[0]!r}"
    duplicates = sorted({host for host in config.hosts if config.hosts.count(host) > 1})
    return f"{', '.join(duplicates)} named twice" if duplicates else None


def _check_min_hosts(config: SshCluster) -> str | None:
    if config.min_hosts is not None and config.min_hosts > len(config.hosts):
        return f"must be at most {len(config.hosts)}, the number of hosts, not {config.min_hosts}"
    return None


def _check_other_ports(config: SshCluster | SlurmCluster) -> str | None:
    if config.other_ports is None:
        return None
    num_ports = len(OWN_PORTS) + _WORKER_PORTS
    if len(config.other_ports) != 2 or config.other_ports[1] - config.other_ports[0] + 1 < num_ports:
        return f"must be [first, last] with room for {num_ports} ports or more, not {config.other_ports}"
    low, high = config.other_ports
    inside = [port for port in (config.port, config.dashboard_port) if low <= port <= high]
    return f"must leave out port {inside[0]}, the head's" if inside else None


def _check_list(key: str, config: ClusterConfig) -> str | None:
    pattern, form = _LIST_FORMS[key]
    odd_texts = [text for text in getattr(config, key) if not re.fullmatch(pattern, text)]
    return f"each must be {form}, not {odd_texts[0]!r}" if odd_texts else None


def _check_shared_memory(key: str, limit: str, config: ClusterConfig) -> str | None:
    """Return the problem if the shared memory `key` is not less than the memory `limit`, or if one is no quantity."""
    amounts = []
    for text in (getattr(config, key), getattr(config, limit)):
        quantity = _QUANTITY.fullmatch(text)
        if quantity is None:
            return f"not an amount as Kubernetes takes it, such as 64Gi: {text!r}"
        number, unit = quantity.groups()
        factor = 1024 if unit.endswith("i") else 1000
        # The exponent of Ki is 1, that of Mi is 2; without a unit it is 0.
        exponent = " KMGTP".index(unit[:1].upper() or " ")
        amounts.append(float(number) * factor**exponent)
    if amounts[0] >= amounts[1]:
        return f"must be less than {limit}, of which it is a part, {getattr(config, limit)}, not {getattr(config, key)}"
    return None


_CHECKS: dict[str, Any] = {
    "name": _check_name,
    "dashboard_port": _check_dashboard_port,
    "hosts": _check_hosts,
    "min_hosts": _check_min_hosts,
    "other_ports": _check_other_ports,
    **{key: partial(_check_list, key) for key in _LIST_FORMS},
    "shm": partial(_check_shared_memory, "shm", "memory"),
    "head_shm": partial(_check_shared_memory, "head_shm", "head_memory"),
}
