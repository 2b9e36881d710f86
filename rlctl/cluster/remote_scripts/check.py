"""Runs on a host: what it has, before anything is started. Any Python from 3.6 on can answer.

request: ports (to be free), name (of the folder that Ray will get). The reply is facts; whether they will do is
judged by who asked.
"""

import errno
import json  # noqa: F401  (used by what is put behind this program)
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

# A Unix socket's path has at most 107 bytes, of which Ray's own part and our folder's name take 84.
ROOM = 107 - 84


def run(request: "dict[str, Any]") -> "dict[str, Any]":
    now = time.time()
    root = folder_root()
    gpus, driver = nvidia()
    return {
        "time": now,
        "python": ".".join(map(str, sys.version_info[:3])),
        "ray": version("ray"),
        "psutil": version("psutil"),
        "dashboard": has("aiohttp_cors", "opencensus", "opentelemetry", "prometheus_client"),
        "cores": os.cpu_count(),
        "memory": memory(),
        "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "root": root,
        "disk": shutil.disk_usage(root).free if root else 0,
        "gpus": gpus,
        "driver": driver,
        "taken": [port for port in request["ports"] if port and not is_free(port)],
        "address": address(),
        "host": socket.gethostname(),
    }


def folder_root() -> "str | None":
    try:
        usual = tempfile.gettempdir()
    except OSError:
        return None
    return usual if len(os.fsencode(usual)) <= ROOM else "/tmp"


def version(name: str) -> "str | None":
    try:
        from importlib.metadata import version as find

        return find(name)
    except Exception:
        return None


def has(*names: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in names)


def memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def is_free(port: int) -> bool:
    # Somebody who listens on one address alone is enough to fail Ray, which may take another.
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((everywhere, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def address() -> "str | None":
    """Where other hosts find this one: the address at which the ssh connection arrived."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


def nvidia() -> "tuple[list[str], str | None]":
    if not shutil.which("nvidia-smi"):
        return [], None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except subprocess.TimeoutExpired:
        return [], "does not answer"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines()]
    rows = [row for row in rows if len(row) == 3]
    return [row[0] for row in rows], rows[0][2] if rows else None
