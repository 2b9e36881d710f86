"""`load_cluster`: from a name or a file to a checked cluster config, or every problem at once."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.config.builtin import CONFIGS, find
from rlctl.config.cluster_schema import (
    CLUSTER_KINDS,
    OWN_PORTS,
    ClusterConfig,
    HostCluster,
    KubernetesCluster,
    SlurmCluster,
    SshCluster,
)
from rlctl.config.compose import compose
from rlctl.config.convert import Converter
from rlctl.config.errors import BrokenValueError, ConfigError, Problem, did_you_mean
from rlctl.config.provenance import ConfigNode, leaves, show_path

FOLDER = CONFIGS / "cluster"
# Room for workers beside Ray's own ports: one for each, and a driver's.
_WORKER_PORTS = 16
# A name that begins with a dash would be an option to ssh.
_HOST = re.compile(r"[^\s/-][^\s/]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
# Kubernetes makes names of other things of it, of at most 63 letters.
_POD_NAME = re.compile(r"[a-z]([a-z0-9-]{0,39}[a-z0-9])?")
_TOLERATION = re.compile(r"[^=:\s]+(=[^=:\s]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)((?:[KMGTP]i)|[kMGTP]|)")


def cluster_names() -> list[str]:
    """Names of the shipped clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "base")


def load_cluster(cluster: str, overrides: list[str]) -> ClusterConfig:
    """The config of `cluster`, a shipped name or a YAML file, `name` filled in. Raises ConfigError."""
    file = find_cluster(cluster)
    root = compose(file, overrides)
    assert isinstance(root.value, dict)
    stated = root.value.get("kind")
    if stated is None or not isinstance(stated.value, str) or stated.value not in CLUSTER_KINDS:
        where = str(stated.origin) if stated else show_path(file)
        what = f"must be one of {', '.join(CLUSTER_KINDS)}: inherit it, such as `defaults: cluster/local.yaml`"
        raise ConfigError([Problem(where, "kind", what)])
    kind = str(stated.value)
    converter: Converter[Any] = Converter(
        CLUSTER_KINDS[kind], show_path(file), CLUSTER_KINDS.values(), (f"cluster/{kind}.yaml",)
    )
    config = converter.convert(root)
    if config.name is None:
        config.name = file.stem
    problems = [*converter.problems, *_check(config, root, file)]
    if problems:
        raise ConfigError(problems)
    checked: ClusterConfig = config
    return checked


def find_cluster(cluster: str) -> Path:
    """The file that a person means: a shipped name, or a path with or without .yaml."""
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


def _check(config: Any, root: ConfigNode, file: Path) -> Iterator[Problem]:
    """What a type cannot say. A check that needs a value already found wrong is left out."""
    origins = {key: str(node.origin) for key, node in leaves(root)}
    for key, check in _CHECKS.items():
        try:
            what = check(config)
        except (BrokenValueError, AttributeError):
            continue
        if what:
            where = next((at for name, at in origins.items() if name == key or name.startswith(f"{key}.")), "")
            yield Problem(where or show_path(file), key, what)


def _name(config: ClusterConfig) -> str | None:
    if config.kind == "kubernetes":
        what = f"must be small letters, digits and dashes, from a letter on, at most 41, not {config.name!r}"
        return None if _POD_NAME.fullmatch(str(config.name)) else what
    if _NAME.fullmatch(str(config.name)):
        return None
    return f"must be letters, digits, dots, dashes and underscores, at most 41, not {config.name!r}"


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


def _sbatch_options(config: SlurmCluster) -> str | None:
    odd = [option for option in config.sbatch_options if not option.startswith("-") or "\n" in option]
    return f"each must be one option of sbatch, with its dash, not {odd[0]!r}" if odd else None


def _volume_claims(config: KubernetesCluster) -> str | None:
    odd = [claim for claim in config.volume_claims if not re.fullmatch(r"[^:/\s]+:/\S+", claim)]
    return f"each must be claim:/path, not {odd[0]!r}" if odd else None


def _node_selector(config: KubernetesCluster) -> str | None:
    odd = [pair for pair in config.node_selector if not re.fullmatch(r"[^=\s]+=[^=\s]*", pair)]
    return f"each must be label=value, not {odd[0]!r}" if odd else None


def _tolerations(config: KubernetesCluster) -> str | None:
    odd = [each for each in config.tolerations if not _TOLERATION.fullmatch(each)]
    effects = "NoSchedule, PreferNoSchedule or NoExecute"
    return f"each must be key, key=value, or either with :Effect ({effects}), not {odd[0]!r}" if odd else None


def _shm(config: KubernetesCluster) -> str | None:
    return _fits(config.shm, config.memory, "memory")


def _head_shm(config: KubernetesCluster) -> str | None:
    return _fits(config.head_shm, config.head_memory, "head_memory")


def _fits(shm: str, memory: str, key: str) -> str | None:
    """Shared memory is memory, and is counted in its limit."""
    for text in (shm, memory):
        if not _QUANTITY.fullmatch(text):
            return f"not an amount as Kubernetes takes it, such as 64Gi: {text!r}"
    if _bytes(shm) >= _bytes(memory):
        return f"must be less than {key}, of which it is a part, {memory}, not {shm}"
    return None


def _bytes(quantity: str) -> float:
    number, unit = re.fullmatch(_QUANTITY, quantity).groups()  # type: ignore[union-attr]
    factor: int = 1024 if unit.endswith("i") else 1000
    return float(number) * float(factor ** " KMGTP".index(unit[:1].upper() or " "))


_CHECKS: dict[str, Any] = {
    "name": _name,
    "dashboard_port": _dashboard,
    "hosts": _hosts,
    "min_hosts": _min_hosts,
    "other_ports": _other_ports,
    "sbatch_options": _sbatch_options,
    "volume_claims": _volume_claims,
    "node_selector": _node_selector,
    "tolerations": _tolerations,
    "shm": _shm,
    "head_shm": _head_shm,
}
