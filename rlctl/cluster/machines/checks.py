"""Asks every host, at the same time, whether it will do, before anything is started on any."""

import socket
import time
from typing import Any

from rlctl.cluster.hosts import Host, HostCalls, HostError
from rlctl.cluster.launcher import Say
from rlctl.cluster.links import ssh_host
from rlctl.cluster.ray_start import LOOPBACK, Place, is_loopback
from rlctl.cluster.requirements import HostReply, Requirements, clock_skew, facts, minor, problems, taken, wanted_ray
from rlctl.cluster.state import ClusterError, ClusterNode
from rlctl.config.cluster_schema import LocalCluster, SshCluster

_CHECK_S = 60.0


def places(config: LocalCluster | SshCluster, say: Say) -> tuple[list[Place], list[str]]:
    """Where nodes go, and warnings, after every host was checked. Raises ClusterError if too few will do."""
    names = [""] if isinstance(config, LocalCluster) else config.hosts
    say("doing", "checking")
    replies = _alike(_checked(config, names, [config.port, config.dashboard_port], say), names, say)
    least = 1 if isinstance(config, LocalCluster) else config.min_hosts or len(names)
    if len(replies) < least:
        count = f"{len(replies)} of {len(names)} hosts will do"
        least_is = f", {least} wanted (min_hosts)" if isinstance(config, SshCluster) and config.min_hosts else ""
        raise ClusterError("this machine will not do" if not names[0] else f"{count}{least_is}: nothing was started")
    found = [] if len(replies) == len(names) else [f"going on with {len(replies)} of {len(names)} hosts (min_hosts)"]
    if isinstance(config, LocalCluster):
        reply, address = replies[""], _own_address() if config.listen_on_all else LOOPBACK
        titles = ["head", *(f"node-{index}" for index in range(1, config.nodes))]
        return [Place(name, "", address, reply["root"], reply["shm"], reply["dashboard"]) for name in titles], found
    spots = [
        Place(name, name, reply["address"], reply["root"], reply["shm"], reply["dashboard"])
        for name, reply in replies.items()
    ]
    return spots, found


def places_again(
    config: LocalCluster | SshCluster, nodes: list[ClusterNode], python: str, say: Say
) -> dict[str, Place]:
    """Where those of `nodes` go, by name, whose hosts will do beside a head that has `python`."""
    say("doing", "checking")
    replies = _checked(config, sorted({node.host for node in nodes}), [], say)
    found = {}
    for node in nodes:
        reply = replies.get(node.host)
        if reply is None:
            continue
        if minor(reply["python"]) != minor(python):
            say("bad", f"{node.name}: wrong Python {reply['python']}: the head has {python}, and Ray wants one for all")
            continue
        address = reply["address"] if node.host else node.address
        found[node.name] = Place(node.name, node.host, address, reply["root"], reply["shm"], reply["dashboard"])
    return found


def _checked(
    config: LocalCluster | SshCluster, names: list[str], ports: list[int], say: Say
) -> dict[str, dict[str, Any]]:
    """What each host that will do answered, in the order of `names`; a line is said of each.

    ports: to be free at the first of them.
    """
    hosts = [_host(config, name) for name in names]
    began = time.time()
    asking = HostCalls(((host, "check", {"ports": ports}) for host in hosts), _CHECK_S)
    asked: dict[str, HostReply] = {}
    skew = config.max_clock_skew_s if isinstance(config, SshCluster) else 60
    wanted = Requirements(wanted_ray(), config.min_disk_gib, skew)
    bad: dict[str, list[str]] = {}
    try:
        for index, answer in asking.answers():
            name = names[index]
            if isinstance(answer, HostError):
                bad[name] = [str(answer)]
            else:
                asked[name] = HostReply(name, answer, began, time.time())
                bad[name] = problems(asked[name], wanted) + _misplaced(answer, len(names), name)
                # The first is to be the head; another becomes it only if those before it are down.
                bad[name] += taken(answer) if index == 0 else []
            _say_host(name, asked.get(name), bad[name], say)
    except BaseException:
        asking.cancel()
        raise
    return {name: asked[name].reply for name in names if not bad[name]}


def _alike(fit: dict[str, dict[str, Any]], names: list[str], say: Say) -> dict[str, dict[str, Any]]:
    """Those of them that the head can have beside it: Ray wants one minor version of Python for all."""
    for name in [name for name in names if name in fit]:
        if not (why := taken(fit[name])):
            break
        say("bad", f"{name}: {'; '.join(why)}")
        del fit[name]
    if not fit:
        return fit
    head = next(name for name in names if name in fit)
    wanted = minor(fit[head]["python"])
    for name in [name for name in fit if minor(fit[name]["python"]) != wanted]:
        found = fit.pop(name)["python"]
        say("bad", f"{name}: wrong Python {found}: the head {head} has {wanted}, and Ray wants one for all")
    return fit


def _misplaced(reply: dict[str, Any], hosts: int, name: str) -> list[str]:
    if not name:
        return []
    if reply["address"] is None:
        return ["its ssh does not say at which address it was reached (SSH_CONNECTION)"]
    if hosts > 1 and is_loopback(reply["address"]):
        return [f"reached at {reply['address']}, where the other hosts cannot: name it by another address"]
    return []


def _say_host(name: str, asked: HostReply | None, bad: list[str], say: Say) -> None:
    shown = name or "this machine"
    for problem in bad:
        say("bad", f"{shown}: {problem}")
    if asked is not None and not bad:
        skew = clock_skew(asked)
        say("ok", f"{shown}: {facts(asked.reply)}" + (f", clock {skew:+.1f} s" if abs(skew) >= 0.1 else ""))


def _host(config: LocalCluster | SshCluster, name: str) -> Host:
    if isinstance(config, LocalCluster):
        return Host("")
    return ssh_host(name, config.python, config.connect_timeout_s, config.ssh_options)


def _own_address() -> str:
    """The address under which this machine goes out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address
