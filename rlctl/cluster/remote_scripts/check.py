"""Runs on a host: reports what it has, before anything is started. Any Python from 3.6 on can answer.

request: ports (to be free). The reply is facts, which the caller judges.
"""

import errno
import os
import shutil
import socket
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from rlctl.cluster.remote_scripts.shared import nvidia, software, version

# A Unix socket's path has at most 107 bytes, of which Ray's own part and our folder's name take 84.
ROOM = 107 - 84


def run(request: "dict[str, Any]") -> "dict[str, Any]":
    now = time.time()
    root = folder_root()
    gpus, driver = nvidia("name")
    server = ("aiohttp_cors", "opencensus", "opentelemetry", "prometheus_client")
    # "client address, its port, own address, own port": where the ssh connection arrived, other hosts find this one.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        **software(),
        "time": now,
        "psutil": version("psutil"),
        "dashboard": all(find_spec(name) is not None for name in server),
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
    try:
        usual = tempfile.gettempdir()
    except OSError:
        return None
    return usual if len(os.fsencode(usual)) <= ROOM else "/tmp"


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
