"""Checks of all hosts at the same time, before anything is started."""

import socket
import time
from typing import Any

from rlctl.cluster.hosts import Host, HostCalls, HostError, ssh_host
from rlctl.cluster.launcher import Say
from rlctl.cluster.ray_start import LOOPBACK, Place, is_loopback
from rlctl.cluster.requirements import clock_skew, facts, minor, problems, taken_port_problems
from rlctl.cluster.state import ClusterError, ClusterNode
from rlctl.config.cluster_schema import LocalCluster, SshCluster

_CHECK_S = 60.0
Replies = dict[str, dict[str, Any]]


def places(config: LocalCluster | SshCluster, say: Say) -> tuple[list[Place], list[str]]:
    """Check every host. Return the places for nodes, the head first, and warnings. Raises ClusterError if too few are
    fit.
    """
    # The empty name is this machine.
    names = [""] if isinstance(config, LocalCluster) else config.hosts
    min_hosts = config.min_hosts if isinstance(config, SshCluster) else None
    replies = _check_hosts(config, names, [config.port, config.dashboard_port], say)
    _drop_unlike(replies, say)
    if len(replies) < (min_hosts or len(names)):
        if isinstance(config, LocalCluster):
            raise ClusterError("this machine is not fit: see the lines above")
        required = f", {min_hosts} wanted (min_hosts)" if min_hosts else ""
        raise ClusterError(f"{len(replies)} of {len(names)} hosts will do{required}: nothing was started")
    warnings = []
    if len(replies) < len(names):
        warnings.append(f"going on with {len(replies)} of {len(names)} hosts (min_hosts)")
    if isinstance(config, LocalCluster):
        address = _own_address() if config.listen_on_all else LOOPBACK
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        return [_host_place(title, "", address, replies[""]) for title in titles], warnings
    return [_host_place(name, name, reply["address"], reply) for name, reply in replies.items()], warnings


def places_again(
    config: LocalCluster | SshCluster, nodes: list[ClusterNode], python: str, say: Say
) -> dict[str, Place]:
    """Check the hosts of lost nodes. Return node name -> place, for each node whose host is fit.

    python: Python version of the head.
    """
    replies = _check_hosts(config, sorted({node.host for node in nodes}), [], say)
    places = {}
    for node in nodes:
        reply = replies.get(node.host)
        if reply is None:
            # The host is unfit, as `_check_hosts` has said.
            continue
        if minor(reply["python"]) != minor(python):
            say("bad", f"{node.name}: wrong Python {reply['python']}: the head has {python}, and Ray wants one for all")
            continue
        # A node on this machine keeps its address: only a host over ssh reports one.
        address = reply["address"] if node.host else node.address
        places[node.name] = _host_place(node.name, node.host, address, reply)
    return places


def _host_place(name: str, host: str, address: str, reply: dict[str, Any]) -> Place:
    """Return the place for the node `name` on a host. reply: the host's reply of `remote_scripts/check.py`."""
    return Place(
        name=name,
        host=host,
        address=address,
        root=reply["root"],
        shm_bytes=reply["shm"],
        has_dashboard=reply["dashboard"],
    )


def _check_hosts(config: LocalCluster | SshCluster, names: list[str], ports: list[int], say: Say) -> Replies:
    """Return host name -> reply for the fit hosts, in the order of `names`. Report one line about each host.

    ports: ports that must be free on the head.
    """
    say("doing", "checking")
    hosts = [Host("")]
    # This machine's own clock shows no skew, unless it is set during the check.
    max_skew = 60.0
    if isinstance(config, SshCluster):
        max_skew = config.max_clock_skew_s
        hosts = [ssh_host(name, config.python, config.connect_timeout_s, config.ssh_options) for name in names]
    begin = time.time()
    fit_replies = {}
    with HostCalls(((host, "check.run", {"ports": ports}) for host in hosts), _CHECK_S) as checking:
        for index, answer in checking.answers():
            name = names[index]
            title = name or "this machine"
            if isinstance(answer, HostError):
                say("bad", f"{title}: {answer}")
                continue
            skew = clock_skew(answer["time"], begin, time.time())
            host_problems = problems(answer, config.min_disk_gib, skew, max_skew)
            host_problems += _address_problems(answer, len(names), name)
            # The first host should be the head. Another becomes the head only if all hosts before it are unfit.
            if index == 0:
                host_problems += taken_port_problems(answer)
            for problem in host_problems:
                say("bad", f"{title}: {problem}")
            if not host_problems:
                fit_replies[name] = answer
                clock = f", clock {skew:+.1f} s" if abs(skew) >= 0.1 else ""
                say("ok", f"{title}: {facts(answer)}{clock}")
    return {name: fit_replies[name] for name in names if name in fit_replies}


def _drop_unlike(replies: Replies, say: Say) -> None:
    """Remove hosts with taken ports from the front, until the first can be the head. Remove hosts whose Python differs
    from the head's.
    """
    for name in list(replies):
        port_problems = taken_port_problems(replies[name])
        if not port_problems:
            break
        say("bad", f"{name}: {'; '.join(port_problems)}")
        del replies[name]
    if not replies:
        return
    head = next(iter(replies))
    head_python = minor(replies[head]["python"])
    # Ray needs the same minor version of Python on all nodes.
    for name in [name for name in replies if minor(replies[name]["python"]) != head_python]:
        python = replies.pop(name)["python"]
        say("bad", f"{name}: wrong Python {python}: the head {head} has {head_python}, and Ray wants one for all")


def _address_problems(reply: dict[str, Any], num_hosts: int, name: str) -> list[str]:
    """Return the reason why other nodes cannot reach the host at the address that ssh used; empty if they can."""
    if not name:
        # This machine: no other host must reach it.
        return []
    if reply["address"] is None:
        return ["its ssh does not say at which address it was reached (SSH_CONNECTION)"]
    if num_hosts > 1 and is_loopback(reply["address"]):
        return [f"reached at {reply['address']}, where the other hosts cannot: name it by another address"]
    return []


def _own_address() -> str:
    """Return the address that this machine uses for outgoing connections. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address
