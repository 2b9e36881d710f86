"""Runs on a host: starts a Ray node in a folder of its own and returns at once; `wait.py` sees it come up.

request: root, folder (a name), token, arguments (of `ray start`, `{port}` in them a free port), environment,
joins_loopback (a further node of a cluster on loopback). The reply: folder, pid, create_time, ports of a head.
"""

import json
import os
import socket
import subprocess
import sys
from typing import Any

# Ray's command, but without the server of Ray Client, which has no use here, takes a fixed port, and on a busy machine
# gives up while the node still starts: the whole node then ends with it.
START = """
import sys
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
"""
# Ray refuses a second node where loopback was asked for, and takes that address for another.
JOINING = """
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.resolve_ip_for_localhost = lambda host: host
"""
MAIN = "sys.exit(scripts.main())"
# Ray opens its folder to everybody: below the node's, which nobody else enters.
RAY = "r"


def run(request: dict[str, Any]) -> dict[str, Any]:
    import psutil

    folder = os.path.join(request["root"], request["folder"])
    os.mkdir(folder, 0o700)
    token = os.path.join(folder, "token")
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(request["token"])
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    environment.update(request["environment"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=token, TMPDIR=folder)
    ray = START + (JOINING if request["joins_loopback"] else "") + MAIN
    arguments = [each.replace("{port}", str(free_port())) for each in request["arguments"]]
    with open(os.path.join(folder, "start.log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", ray, "start", *arguments, "--block", "--temp-dir", os.path.join(folder, RAY)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=os.path.expanduser("~"),
            start_new_session=True,
        )
    started = {"folder": folder, "pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
    # For `stop.py`, should this answer never arrive.
    with open(os.path.join(folder, "node.json"), "w") as file:
        json.dump(started, file)
    values = dict(each.strip("-").split("=", 1) for each in arguments if "=" in each)
    return {**started, "ports": {name: int(values[name]) for name in ("port", "dashboard-port") if name in values}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
