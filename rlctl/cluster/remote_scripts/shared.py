"""Functions that several of these programs need; the text replaces the line that imports it (see `hosts.py`).

Any Python from 3.6 on can read it.
"""

import os
import shutil
import subprocess
import sys
from typing import Any


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
    """Return the fields of nvidia-smi for each GPU, and the version of the driver."""
    if not shutil.which("nvidia-smi"):
        return [], None
    names = ",".join(["driver_version", *fields])
    query = ["nvidia-smi", "--query-gpu=" + names, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [], "does not answer"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines()]
    rows = [row for row in rows if len(row) == 1 + len(fields)]
    return [row[1:] for row in rows], rows[0][0] if rows else None


def kept_logs(request: "dict[str, Any]") -> str:
    """Return the folder of the logs that a node leaves: `keep`, or below $XDG_STATE_HOME by cluster and node."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    usual = os.path.join(state, "rlctl", "clusters", request["cluster"], "logs", request["node"])
    return str(request["keep"] or usual)
