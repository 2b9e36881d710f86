"""Checks of every host, all at the same time, before anything is started on any."""

import socket
import time
from typing import Any

from rlctl.cluster.hosts import Host, HostCalls, HostError, ssh_host
from rlctl.cluster.launcher import Say
from rlctl.cluster.ray_start import LOOPBACK, Place, is_loopback
from rlctl.cluster.requirements import clock_skew, facts, minor, problems, taken
from rlctl.cluster.state import ClusterError, ClusterNode
from rlctl.config.cluster_schema import LocalCluster, SshCluster

_CHECK_S = 60.0
Replies = dict[str, dict[str, Any]]


def places(config: LocalCluster | SshCluster, say: Say) -> tuple[list[Place], list[str]]:
    """Check every host; return where nodes go, the head first, and warnings. Raises ClusterError if too few will do."""
    local = isinstance(config, LocalCluster)
    names = [""] if isinstance(config, LocalCluster) else config.hosts
    min_hosts = config.min_hosts if isinstance(config, SshCluster) else None
    replies = _check_hosts(config, names, [config.port, config.dashboard_port], say)
    _drop_unlike(replies, say)
    if len(replies) < (min_hosts or len(names)):
        wanted = f", {min_hosts} wanted (min_hosts)" if min_hosts else ""
        count = f"{len(replies)} of {len(names)} hosts will do{wanted}: nothing was started"
        raise ClusterError("this machine will not do" if local else count)
    found = [] if len(replies) == len(names) else [f"going on with {len(replies)} of {len(names)} hosts (min_hosts)"]
    if isinstance(config, LocalCluster):
        address = _own_address() if config.listen_on_all else LOOPBACK
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        return [_host_place(title, "", address, replies[""]) for title in titles], found
    return [_host_place(name, name, reply["address"], reply) for name, reply in replies.items()], found


def places_again(
    config: LocalCluster | SshCluster, nodes: list[ClusterNode], python: str, say: Say
) -> dict[str, Place]:
    """Return the places of nodes by name, where the host will do. python: the version of the head."""
    replies = _check_hosts(config, sorted({node.host for node in nodes}), [], say)
    found = {}
    for node in nodes:
        reply = replies.get(node.host)
        if reply is None:
            continue
        if minor(reply["python"]) != minor(python):
            say("bad", f"{node.name}: wrong Python {reply['python']}: the head has {python}, and Ray wants one for all")
            continue
        found[node.name] = _host_place(node.name, node.host, reply["address"] if node.host else node.address, reply)
    return found


def _host_place(name: str, host: str, address: str, reply: dict[str, Any]) -> Place:
    return Place(name, host, address, reply["root"], reply["shm"], reply["dashboard"])


def _check_hosts(config: LocalCluster | SshCluster, names: list[str], ports: list[int], say: Say) -> Replies:
    """Return the answers of the hosts that will do, in the order of `names`; say a line about each host.

    ports: must be free on the host that is to be the head.
    """
    say("doing", "checking")
    hosts, max_skew = [Host("")], 60.0
    if isinstance(config, SshCluster):
        max_skew = config.max_clock_skew_s
        hosts = [ssh_host(name, config.python, config.connect_timeout_s, config.ssh_options) for name in names]
    began, fit = time.time(), {}
    with HostCalls(((host, "check.run", {"ports": ports}) for host in hosts), _CHECK_S) as checking:
        for index, answer in checking.answers():
            name = names[index]
            shown = name or "this machine"
            if isinstance(answer, HostError):
                say("bad", f"{shown}: {answer}")
                continue
            skew = clock_skew(answer["time"], began, time.time())
            bad = problems(answer, config.min_disk_gib, skew, max_skew) + _misplaced(answer, len(names), name)
            # The first is to be the head; another becomes it only if those before it are down.
            bad += taken(answer) if index == 0 else []
            for problem in bad:
                say("bad", f"{shown}: {problem}")
            if not bad:
                fit[name] = answer
                say("ok", f"{shown}: {facts(answer)}" + (f", clock {skew:+.1f} s" if abs(skew) >= 0.1 else ""))
    return {name: fit[name] for name in names if name in fit}


def _drop_unlike(fit: Replies, say: Say) -> None:
    """Drop hosts with taken ports until one can be the head, and hosts that cannot work with that head."""
    for name in list(fit):
        if not (why := taken(fit[name])):
            break
        say("bad", f"{name}: {'; '.join(why)}")
        del fit[name]
    if not fit:
        return
    head = next(iter(fit))
    wanted = minor(fit[head]["python"])
    # Ray wants one minor version of Python for all.
    for name in [name for name in fit if minor(fit[name]["python"]) != wanted]:
        found = fit.pop(name)["python"]
        say("bad", f"{name}: wrong Python {found}: the head {head} has {wanted}, and Ray wants one for all")


def _misplaced(reply: dict[str, Any], hosts: int, name: str) -> list[str]:
    if not name:
        return []
    if reply["address"] is None:
        return ["its ssh does not say at which address it was reached (SSH_CONNECTION)"]
    if hosts > 1 and is_loopback(reply["address"]):
        return [f"reached at {reply['address']}, where the other hosts cannot: name it by another address"]
    return []


def _own_address() -> str:
    """Return the address under which this machine goes out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address
