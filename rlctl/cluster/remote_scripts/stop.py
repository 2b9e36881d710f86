"""Runs on a host: ends a node and whatever it started, keeps its logs and removes the rest.

request: folder, keep (for the logs; null: $XDG_STATE_HOME, with the cluster's and the node's names), cluster, node.
The reply: ended (processes), left (pids that would not go), logs (the folder kept).
"""

import contextlib
import glob
import json
import os
import shutil
import signal
import time
from typing import Any

TERM_S, KILL_S = 12.0, 5.0


def run(request: dict[str, Any]) -> dict[str, Any]:
    import psutil

    folder = request["folder"]
    found = family(folder)
    parents = [process for process in found if is_parent(process, folder)]
    for process in parents or found:
        tell(process, signal.SIGTERM)
    # The rest goes with the parent; what a parent leaves is told itself.
    _, alive = psutil.wait_procs(found, timeout=TERM_S)
    for process in {*alive, *family(folder)}:
        tell(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(family(folder), timeout=KILL_S)
    try:
        logs = keep_logs(request)
    except OSError:
        # A home that is full or read-only keeps no logs; the node is cleared all the same.
        logs = None
    for process in found:
        for path in glob.glob(f"/dev/shm/sem.*{process.pid}-*"):
            os.unlink(path)
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)
    return {"ended": len(found), "left": [process.pid for process in alive], "logs": logs}


def family(folder: str) -> "list[Any]":
    """Every process of the node: of its session, or with the folder on its command line or among its open files."""
    import psutil

    session = session_of(folder)
    mine, found = os.getpid(), []
    for process in psutil.process_iter():
        try:
            if process.pid == mine or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (session and os.getsid(process.pid) == session) or uses(process, folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def session_of(folder: str) -> int:
    """The session that the node was started in, which is its first process's pid; 0 if that pid is another's now."""
    import psutil

    try:
        with open(os.path.join(folder, "node.json")) as file:
            started = json.load(file)
        pid = int(started["pid"])
    except (OSError, ValueError, KeyError):
        return 0
    try:
        return pid if abs(psutil.Process(pid).create_time() - started["create_time"]) < 1 else 0
    except psutil.Error:
        # While any process of a session lives, the kernel gives its number to nobody else.
        return pid


def uses(process: Any, folder: str) -> bool:
    if any(folder in argument for argument in process.cmdline()):
        return True
    return any(file.path.startswith(folder + "/") for file in process.open_files())


def is_parent(process: Any, folder: str) -> bool:
    import psutil

    try:
        command = process.cmdline()
    except psutil.Error:
        # Gone since it was found.
        return False
    return "--block" in command and os.path.join(folder, "r") in command


def tell(process: Any, number: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def keep_logs(request: dict[str, Any]) -> Any:
    folder = request["folder"]
    sources = [os.path.join(folder, "start.log"), os.path.join(folder, "r", "session_latest", "logs")]
    if not any(map(os.path.exists, sources)):
        return None
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    usual = os.path.join(state, "rlctl", "clusters", request["cluster"], "logs", request["node"])
    keep = request["keep"] or usual
    shutil.rmtree(keep, ignore_errors=True)
    os.makedirs(keep, 0o700, exist_ok=True)
    for source in sources:
        if os.path.isdir(source):
            shutil.copytree(source, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        elif os.path.exists(source):
            shutil.copy(source, keep)
    return keep
