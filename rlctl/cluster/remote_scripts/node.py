"""Programs on a host that start a Ray node, wait until it is up, inspect it and stop it.

start: starts a Ray node in a new folder and returns at once. request: root, folder (a name in root), token, arguments
(of `ray start`; `{port}` is replaced by a free port), environment, joins_loopback (true for a node that joins a cluster
on loopback). Reply: folder, pid, start_id, ports (of a head).

wait: waits until the node is up or has failed. request: folder, pid, start_id, port (of the dashboard, which must
answer too, or null), head (host and port to which the node connects, checked meanwhile; null or missing: not checked),
deadline_s. Reply: ready, why (reason of a failure), dashboard (true if the port answers).

look: reports the state of the node and its machine. request: folder, pid, start_id. Reply: alive, bytes of memory,
shared memory and free disk, GPUs and driver, versions, and every port on which the node's processes listen.

stop: ends all processes of the node. Keeps its logs, and removes its other files and those of killed runs on this
machine. request: folder; keep, cluster, node (see `kept_logs`). Reply: left (pids that did not end), logs (folder of
the kept logs, or null).
"""

import contextlib
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil

from rlctl.cluster.remote_scripts.check import nvidia, software
from rlctl.utils.ports import free_port
from rlctl.utils.process import start_id
from rlctl.utils.ray_token import TOKEN, token_environment

# Program that runs Ray's command without the Ray Client server. The server is not needed and uses a fixed port. On a
# busy machine it may time out while the node still starts, and end the whole node.
START = """
import sys
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
"""
# Patch for a second node on loopback: Ray would refuse such a node, and would replace its address by another.
JOINING = """
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.resolve_ip_for_localhost = lambda host: host
"""
MAIN = "sys.exit(scripts.main())"
# Name of Ray's folder inside the node's private folder: Ray makes its own folder readable to everybody.
RAY = "r"
LEAST_DISK = 1 << 20
LONGEST_SILENCE_S = 6.0
TERM_S = 12.0
KILL_S = 5.0


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a Ray node in a new folder and return at once, see above."""
    folder = os.path.join(request["root"], request["folder"])
    os.mkdir(folder, 0o700)
    token = os.path.join(folder, "token")
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(request["token"])
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", TOKEN)}
    environment.update(request["environment"], **token_environment(token), TMPDIR=folder)
    ray = START + (JOINING if request["joins_loopback"] else "") + MAIN
    arguments = [argument.replace("{port}", str(free_port("0.0.0.0"))) for argument in request["arguments"]]
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
    started = {"folder": folder, "pid": process.pid, "start_id": start_id(process.pid)}
    # `stop` reads this file, in case the reply never reaches the caller.
    with open(os.path.join(folder, "node.json"), "w") as file:
        json.dump(started, file)
    options = dict(argument.strip("-").split("=", 1) for argument in arguments if "=" in argument)
    return {**started, "ports": {name: int(options[name]) for name in ("port", "dashboard-port") if name in options}}


def wait(request: dict[str, Any]) -> dict[str, Any]:
    """Wait until the node is up or has failed, see above."""
    # The wait ends with its caller: this process then has another parent.
    parent = os.getppid()
    last_answer = time.monotonic()
    end = last_answer + request["deadline_s"]
    log = os.path.join(request["folder"], "start.log")
    while time.monotonic() < end and os.getppid() == parent:
        with open(log, errors="replace") as file:
            text = file.read()
        if "Ray runtime started" in text:
            return {"ready": True, "why": "", "dashboard": wait_for_port(request["port"], request, end)}
        if not lives(request):
            return failure_reply(reason(text))
        # Ray's processes do not report the following failures. They would wait for each other until the deadline.
        if shutil.disk_usage(request["folder"]).free < LEAST_DISK:
            return failure_reply("disk full: nothing left for Ray's files in " + os.path.dirname(request["folder"]))
        head = request.get("head")
        if head is None or answers(*head):
            last_answer = time.monotonic()
        elif time.monotonic() - last_answer > LONGEST_SILENCE_S:
            host, port = head
            problem = f"the head does not answer at port {port} of {host}"
            return failure_reply(f"{problem}: it ended, or a firewall is between them")
        time.sleep(0.3)
    return failure_reply("not up within {:g} s (start_timeout_s)".format(request["deadline_s"]))


def failure_reply(reason: str) -> dict[str, Any]:
    return {"ready": False, "why": reason, "dashboard": False}


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False


def wait_for_port(port: Any, request: dict[str, Any], end: float) -> bool:
    """Wait until a port of this machine answers. Return False without a port, at `end`, or if the node has ended."""
    while port and time.monotonic() < end and lives(request):
        if answers("127.0.0.1", port):
            return True
        time.sleep(0.3)
    return False


def reason(text: str) -> str:
    """Return the line of a log that best explains why the process ended: the last exception, else the last line."""
    # In a line of Ray's log, the text comes after time, level and file, and " -- ".
    lines = [line.split(" -- ")[-1].strip() for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (exceptions or lines or ["its log is empty"])[-1]


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the node and its machine, see above."""
    memory = psutil.virtual_memory()
    gpus, driver = nvidia("name", "memory.total", "memory.used", "utilization.gpu")
    return {
        **software(),
        "alive": lives(request),
        "memory": memory.total,
        "memory_free": memory.available,
        "disk_free": shutil.disk_usage(os.path.dirname(request["folder"])).free,
        "gpus": [dict(zip(("name", "memory_mib", "used_mib", "busy_percent"), gpu)) for gpu in gpus],
        "driver": driver,
        "listening": listening(request),
    }


def listening(request: dict[str, Any]) -> "list[list[Any]]":
    """Return [address, port, process name] for every TCP port on which a process of the node's session listens."""
    listeners = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) != request["pid"]:
                continue
            connections = getattr(process, "net_connections", None) or process.connections
            for connection in connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address = connection.laddr.ip.replace("::ffff:", "")
                    listeners.append([address, connection.laddr.port, process.name()])
        except (psutil.Error, OSError):
            continue
    return sorted(listeners)


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End all processes of the node, keep its logs and remove its other files, see above."""
    # Imported here because rlctl.workers sets variables for a run's private Ray, and `start` would pass them on.
    from rlctl.workers.reaper import leftovers, sweep

    folder = request["folder"]
    processes = family(folder)
    # Only `ray start` is asked to end, if it lives: it ends the other processes in order. The rest is killed.
    parents = [process for process in processes if is_parent(process, folder)]
    tell(parents or processes, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=TERM_S)
    tell({*alive, *family(folder)}, signal.SIGKILL)
    _, alive = psutil.wait_procs(family(folder), timeout=KILL_S)
    try:
        logs = keep_logs(request)
    except OSError:
        # If the home is full or read-only, no logs are kept, and the node is removed nevertheless.
        logs = None
    # Semaphores that the killed processes could not remove: their names have the pid.
    for process in processes:
        for path in glob.glob(f"/dev/shm/sem.*{process.pid}-*"):
            os.unlink(path)
    # A process that is ending may still write into the folder, so that one removal can fail.
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)
    # Remove folders of killed runs, for example weights in transit: their own clean-up processes have just been ended
    # too.
    for leftover in leftovers():
        sweep([leftover.path])
    return {"left": [process.pid for process in alive], "logs": logs}


def family(folder: str) -> "list[psutil.Process]":
    """Return the node's processes: those in its session, or with its folder in the command line or an open file."""
    session = session_of(folder)
    own_pid = os.getpid()
    members = []
    for process in psutil.process_iter():
        try:
            if process.pid == own_pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (
                (session and os.getsid(process.pid) == session)
                or any(folder in argument for argument in process.cmdline())
                or any(file.path.startswith(folder + "/") for file in process.open_files())
            ):
                members.append(process)
        except (psutil.Error, OSError):
            continue
    return members


def session_of(folder: str) -> int:
    """Return the node's session id, which is the pid of its first process; 0 if another process has that pid now."""
    try:
        with open(os.path.join(folder, "node.json")) as file:
            started = json.load(file)
        pid = int(started["pid"])
    except (OSError, ValueError, KeyError):
        return 0
    # If no process has this pid, the first process has ended, and others of its session may live: the kernel does not
    # reuse a session's id before all have ended.
    return pid if not start_id(pid) or lives({"folder": folder, **started}) else 0


def is_parent(process: psutil.Process, folder: str) -> bool:
    """Return True for the node's first process, `ray start --block`, the parent of the others."""
    try:
        command = process.cmdline()
    except psutil.Error:
        # The process has just ended.
        return False
    return "--block" in command and os.path.join(folder, "r") in command


def tell(processes: Any, signal_number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal_number)


def keep_logs(request: dict[str, Any]) -> Any:
    """Copy the node's logs to the folder `kept_logs`, and return it; None if the node wrote none."""
    folder = request["folder"]
    sources = [os.path.join(folder, "start.log"), os.path.join(folder, "r", "session_latest", "logs")]
    if not any(map(os.path.exists, sources)):
        return None
    keep = kept_logs(request)
    shutil.rmtree(keep, ignore_errors=True)
    os.makedirs(keep, 0o700, exist_ok=True)
    for source in sources:
        if os.path.isdir(source):
            shutil.copytree(source, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        elif os.path.exists(source):
            shutil.copy(source, keep)
    return keep


def kept_logs(request: "dict[str, Any]") -> str:
    """Return the folder for the logs of an ended node: `keep`, or a folder in $XDG_STATE_HOME for cluster and node."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    at_home = os.path.join(state, "rlctl", "clusters", request["cluster"], "logs", request["node"])
    return str(request["keep"] or at_home)


def lives(request: dict[str, Any]) -> bool:
    """Return True if the node's first process runs. Another process that has its pid now does not count."""
    running_id = start_id(request["pid"])
    if request.get("start_id"):
        return bool(running_id == request["start_id"])
    # A node of an earlier version of rlctl has no start_id. Its process is recognized by the folder on its command
    # line.
    return bool(running_id) and is_parent(psutil.Process(request["pid"]), request["folder"])
