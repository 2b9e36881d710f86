"""Runs on a host: how a node and its machine are now.

request: folder, pid, create_time. The reply: alive, and bytes free and in all of memory, shared memory and disk, GPUs
and their driver, versions, and every port that the node's processes listen on.
"""

import json  # noqa: F401  (used by what is put behind this program)
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from typing import Any

from rlctl.cluster.remote_scripts.shared import lives


def run(request: dict[str, Any]) -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    root = os.path.dirname(request["folder"])
    gpus, driver = nvidia()
    return {
        "alive": lives(request),
        "memory": memory.total,
        "memory_free": memory.available,
        "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "disk_free": shutil.disk_usage(root).free,
        "gpus": gpus,
        "driver": driver,
        "python": ".".join(map(str, sys.version_info[:3])),
        "ray": version("ray"),
        "listening": listening(request),
    }


def listening(request: dict[str, Any]) -> "list[list[Any]]":
    """[address, port, process] of every TCP port on which a process of the node's session listens."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) != request["pid"]:
                continue
            connections = getattr(process, "net_connections", None) or process.connections
            for each in connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append([each.laddr.ip.replace("::ffff:", ""), each.laddr.port, process.name()])
        except (psutil.Error, OSError):
            continue
    return sorted(found)


def nvidia() -> "tuple[list[dict[str, Any]], Any]":
    if not shutil.which("nvidia-smi"):
        return [], None
    fields = "name,memory.total,memory.used,utilization.gpu,driver_version"
    query = ["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [], "does not answer"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines()]
    rows = [row for row in rows if len(row) == 5]
    gpus = [{"name": row[0], "memory_mib": row[1], "used_mib": row[2], "busy_percent": row[3]} for row in rows]
    return gpus, rows[0][4] if rows else None
