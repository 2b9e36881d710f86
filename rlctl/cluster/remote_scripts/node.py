"""Runs on a host that has Ray: starts a node, waits for it, inspects and stops it.

start: starts a Ray node in a new folder and returns at once. request: root, folder (a name), token, arguments
(of `ray start`, `{port}` in them a free port), environment, joins_loopback (a further node of a cluster on loopback).
The reply: folder, pid, start_id, ports of a head.

wait: waits until the node is up, or says why it ended. request: folder, pid, start_id, port (of the dashboard to
wait for, or null), head (host and port that it joins; null or left out: not asked), deadline_s. The reply: ready, why
(a line of its log), dashboard (true if that port answers).

look: reports how the node and its machine are. request: folder, pid, start_id. The reply: alive, bytes of memory,
shared memory and disk (free ones too), GPUs and their driver, versions, and every port that its processes listen on.

stop: ends the node and all its processes. Keeps its logs and removes its other files, and those of killed runs on this
machine. request: folder; keep,
cluster, node (see `kept_logs`). The reply: left (pids that would not end), logs (the folder kept, or null).
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

# Ray's command without the server of Ray Client, which has no use here, takes a fixed port, and on a busy machine gives
# up while the node still starts: the whole node then ends.
START = """
import sys
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
"""
# Ray refuses a second node where loopback was asked for, and replaces that address by another.
JOINING = """
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.resolve_ip_for_localhost = lambda host: host
"""
MAIN = "sys.exit(scripts.main())"
# Ray opens its folder to everybody: so it is below the node's, which nobody else enters.
RAY = "r"
LEAST_DISK = 1 << 20
LONGEST_SILENCE_S = 6.0
TERM_S = 12.0
KILL_S = 5.0


def start(request: dict[str, Any]) -> dict[str, Any]:
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
    # For `stop`, should this answer never arrive.
    with open(os.path.join(folder, "node.json"), "w") as file:
        json.dump(started, file)
    values = dict(argument.strip("-").split("=", 1) for argument in arguments if "=" in argument)
    return {**started, "ports": {name: int(values[name]) for name in ("port", "dashboard-port") if name in values}}


def wait(request: dict[str, Any]) -> dict[str, Any]:
    parent = os.getppid()
    last_answer = time.monotonic()
    end = last_answer + request["deadline_s"]
    log = os.path.join(request["folder"], "start.log")
    while time.monotonic() < end and os.getppid() == parent:
        with open(log, errors="replace") as file:
            text = file.read()
        if "Ray runtime started" in text:
            return {"ready": True, "why": "", "dashboard": waits_for(request["port"], request, end)}
        if not lives(request):
            return failure_reply(reason(text))
        # Ray's processes do not report the following: they wait for each other until the deadline.
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


def waits_for(port: Any, request: dict[str, Any], end: float) -> bool:
    while port and time.monotonic() < end and lives(request):
        if answers("127.0.0.1", port):
            return True
        time.sleep(0.3)
    return False


def reason(text: str) -> str:
    """Return the line that explains an end best: the last exception, else the last line."""
    lines = [line.split(" -- ")[-1].strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (raised or lines or ["its log is empty"])[-1]


def look(request: dict[str, Any]) -> dict[str, Any]:
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
    """Return [address, port, process] of every TCP port on which a process of the node's session listens."""
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
    # Imported here: the package of workers sets variables of a run's private Ray, which `start` would pass on.
    from rlctl.workers.reaper import leftovers, sweep

    folder = request["folder"]
    processes = family(folder)
    parents = [process for process in processes if is_parent(process, folder)]
    tell(parents or processes, signal.SIGTERM)
    # The other processes end with the parent. Processes that the parent leaves are killed.
    _, alive = psutil.wait_procs(processes, timeout=TERM_S)
    tell({*alive, *family(folder)}, signal.SIGKILL)
    _, alive = psutil.wait_procs(family(folder), timeout=KILL_S)
    try:
        logs = keep_logs(request)
    except OSError:
        # A home that is full or read-only keeps no logs; the node is cleared all the same.
        logs = None
    for process in processes:
        for path in glob.glob(f"/dev/shm/sem.*{process.pid}-*"):
            os.unlink(path)
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)
    # Weights in transit, for example. The processes that would remove them have just ended too.
    for leftover in leftovers():
        sweep([leftover.path])
    return {"left": [process.pid for process in alive], "logs": logs}


def family(folder: str) -> "list[psutil.Process]":
    """Return every process of the node: of its session, or with the folder on its command line or in its open files."""
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
    """Return the session of the node, which is its first process's pid; 0 if that pid is another's now."""
    try:
        with open(os.path.join(folder, "node.json")) as file:
            started = json.load(file)
        pid = int(started["pid"])
    except (OSError, ValueError, KeyError):
        return 0
    # While any process of a session lives, the kernel gives its number to nobody else.
    return pid if not start_id(pid) or lives({"folder": folder, **started}) else 0


def is_parent(process: psutil.Process, folder: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        # The process has ended meanwhile.
        return False
    return "--block" in command and os.path.join(folder, "r") in command


def tell(processes: Any, number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def keep_logs(request: dict[str, Any]) -> Any:
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
    """Return the folder of the logs that a node leaves: `keep`, or below $XDG_STATE_HOME by cluster and node."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    at_home = os.path.join(state, "rlctl", "clusters", request["cluster"], "logs", request["node"])
    return str(request["keep"] or at_home)


def lives(request: dict[str, Any]) -> bool:
    """Return True if the node's first process runs, and not another that has its number now."""
    running_id = start_id(request["pid"])
    if request.get("start_id"):
        return bool(running_id == request["start_id"])
    # An earlier version of rlctl started the node. No other process has the folder's name on its command line.
    return bool(running_id) and is_parent(psutil.Process(request["pid"]), request["folder"])
