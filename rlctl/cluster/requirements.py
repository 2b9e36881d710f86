"""Requirements of a host, checked with the facts that `remote_scripts/check.py` found there. Pure."""

from importlib.metadata import version
from typing import Any

from rlctl.preflight.version import own_version

GIB = 1 << 30
_PYTHON = (3, 11)
_SMALL_SHM = GIB


def minor(text: str) -> str:
    """Return the major and minor version, for example 3.11 for 3.11.7."""
    return ".".join(text.split(".")[:2])


def problems(reply: dict[str, Any], min_disk_gib: float, skew_s: float = 0, max_clock_skew_s: float = 0) -> list[str]:
    """Return the reasons why a host cannot be a node; empty if it can.

    reply: reply of `check.py`. skew_s: seconds by which the host's clock is ahead, see `clock_skew`. The host must have
    the same minor version of Ray and the same version of rlctl as this machine, because they communicate.
    """
    installed_ray = minor(version("ray"))
    lines = []
    if tuple(map(int, reply["python"].split(".")[:2])) < _PYTHON:
        lines.append(f"wrong Python {reply['python']}: rlctl needs 3.11 or newer; set python=...")
    if absent := [name for name in ("ray", "psutil", "rlctl") if reply[name] is None]:
        lines.append(f"{' and '.join(absent)} not installed in its Python: pip install rlctl there, or set python=...")
    elif minor(reply["ray"]) != installed_ray:
        major, _, minor_part = installed_ray.partition(".")
        too_new = f"{major}.{int(minor_part) + 1}"
        lines.append(f"wrong Ray {reply['ray']}: pip install 'ray>={installed_ray},<{too_new}' there")
    # The version is "unknown" in a source tree that pip did not install.
    if reply["rlctl"] not in (None, "unknown", own_version()):
        lines.append(f"wrong rlctl {reply['rlctl']}: pip install rlctl=={own_version()} there")
    if abs(skew_s) > max_clock_skew_s:
        lines.append(
            f"its clock is {abs(skew_s):.1f} s {'fast' if skew_s > 0 else 'slow'}: start its time service (NTP)"
        )
    if reply["root"] is None:
        lines.append("no folder for Ray's files: neither TMPDIR nor /tmp can be written to there")
    elif reply["disk"] < min_disk_gib * GIB:
        free = f"{reply['disk'] / GIB:.1f} GiB free in {reply['root']}"
        lines.append(f"disk full: {free}, {min_disk_gib:g} wanted (min_disk_gib)")
    return lines


def taken_port_problems(reply: dict[str, Any]) -> list[str]:
    """Return the reasons why a host cannot be the head: ports that are taken."""
    return [f"port {port} is taken: stop what listens there, or set another" for port in reply["taken"]]


def warnings(replies: dict[str, dict[str, Any]]) -> list[str]:
    """Return warnings about hosts that will work, but badly. replies: host -> reply of `check.py` or `node.py`."""
    lines = []
    drivers: dict[str, list[str]] = {}
    for host, reply in replies.items():
        if reply["driver"]:
            drivers.setdefault(reply["driver"], []).append(host)
        if reply["shm"] < _SMALL_SHM:
            lines.append(f"{host}: /dev/shm has {reply['shm'] / GIB:.1f} GiB; in a container: --shm-size=2g or more")
        if reply.get("disk_free", _SMALL_SHM) < _SMALL_SHM:
            lines.append(f"{host}: {reply['disk_free'] / GIB:.1f} GiB of disk left for Ray's files")
    if len(drivers) > 1:
        listed = "; ".join(f"{driver} on {', '.join(hosts)}" for driver, hosts in sorted(drivers.items()))
        lines.append(f"mixed CUDA drivers: {listed}")
    return lines


def clock_skew(host_time: float, began: float, ended: float) -> float:
    """Return the least seconds by which a host's clock is ahead of this machine's; negative: behind.

    host_time: the host's clock, read after `began` and before `ended` of this machine's clock. A time between these two
    shows no skew.
    """
    return host_time - ended if host_time > ended else min(0.0, host_time - began)


def facts(reply: dict[str, Any]) -> str:
    """Return a host's versions and resources in one line."""
    gpus = f"{len(reply['gpus'])} x {reply['gpus'][0]}, driver {reply['driver']}" if reply["gpus"] else "no GPU"
    size = f"{reply['cores']} CPUs, {reply['memory'] / GIB:.0f} GiB, {gpus}"
    return f"Python {reply['python']}, Ray {reply['ray']}, {size}, {reply['disk'] / GIB:.0f} GiB disk"
