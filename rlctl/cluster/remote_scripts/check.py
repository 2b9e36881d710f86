"""Program on a host that reports facts about it, before anything is started. It runs on Python 3.6 or newer.

request: ports (that should be free). The reply has the facts; the caller decides whether the host is fit.
"""

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

# Most bytes of the folder's path. A Unix socket's path has at most 107; Ray and the node's folder name take 84.
ROOM = 107 - 84


def run(request: "dict[str, Any]") -> "dict[str, Any]":
    """Return the facts about this host that `requirements.py` checks."""
    now = time.time()
    root = folder_root()
    gpus, driver = nvidia("name")
    dashboard_packages = ("aiohttp_cors", "opencensus", "opentelemetry", "prometheus_client")
    # SSH_CONNECTION is "client address, client port, own address, own port". Other hosts can reach the own address too.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        **software(),
        "time": now,
        "psutil": version("psutil"),
        "rlctl": version("rlctl") or ("unknown" if find_spec("rlctl") else None),
        "dashboard": all(find_spec(name) is not None for name in dashboard_packages),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "root": root,
        "disk": shutil.disk_usage(root).free if root else 0,
        "gpus": [name for (name,) in gpus],
        "driver": driver,
        "taken": [port for port in request["ports"] if port and not is_free(port)],
        "address": connection[2] if len(connection) == 4 else None,
    }


def folder_root() -> "str | None":
    """Return the folder for temporary files, or /tmp if its path is too long; None if no such folder can be used."""
    try:
        root = tempfile.gettempdir()
    except OSError:
        return None
    return root if len(os.fsencode(root)) <= ROOM else "/tmp"


def is_free(port: int) -> bool:
    """Return True if no process listens on a port, and this user may listen there."""
    # Test all interfaces: a listener on any of them could make Ray fail. A host without IPv6 gives another error.
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((everywhere, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def version(name: str) -> "str | None":
    """Return the version of a package; None if it is not installed."""
    try:
        from importlib.metadata import version as find

        return find(name)
    except Exception:
        return None


def software() -> "dict[str, Any]":
    """Return the versions of Python and Ray, and the bytes of shared memory."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "ray": version("ray"),
        "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
    }


def nvidia(*fields: str) -> "tuple[list[list[str]], str | None]":
    """Return (fields of nvidia-smi for each GPU, driver version or None)."""
    if not shutil.which("nvidia-smi"):
        return [], None
    names = ",".join(["driver_version", *fields])
    query = ["nvidia-smi", "--query-gpu=" + names, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [], "does not answer"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines()]
    # Other lines are messages of nvidia-smi.
    rows = [row for row in rows if len(row) == 1 + len(fields)]
    return [row[1:] for row in rows], rows[0][0] if rows else None
