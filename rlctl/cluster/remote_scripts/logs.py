"""Program on a host that prints the last lines of a node's logs, each after the node's name. follow: print new lines
too.

request: folder (of a live node); keep, cluster, node (see `kept_logs`); lines (number), follow; suffixes (of the files
to show; missing: Ray's logs); process (show only its log NAME.log; missing or null: all); on_node (show only logs of
processes on this node; missing or null: all). The exit code is 2 if there is no such process or node. In the log folder
of a run on several nodes, which has the file `NODES`, each line begins with the node of its process.
"""

import json
import os
import re
import sys
import time
from typing import Any

from rlctl.cluster.remote_scripts.node import kept_logs

# Suffixes and prefixes of Ray's logs that contain errors. Ray's other logs are statistics.
SUFFIXES = ("start.log", "gcs_server.out", "raylet.out", ".err")
PREFIXES = ("worker-", "job-driver-")
# File with process name -> node, in the log folder of a run on several nodes. A log without an entry counts as the
# driver's.
NODES = "nodes.json"
# Control characters except tab, and direction marks that reorder a line.
UNSAFE = "[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"


def run(request: dict[str, Any]) -> None:
    """Print the logs that the request asks for, see above."""
    parent = os.getppid()
    node_folder = request["folder"]
    folders = [kept_logs(request)]
    # The node's own folder exists until the node is stopped. Then only the kept logs are left.
    if node_folder and os.path.isdir(node_folder):
        folders = [node_folder, os.path.join(node_folder, "r", "session_latest", "logs")]
    if not os.path.isdir(folders[0]):
        print("{}: no logs".format(request["node"]))
        return
    # Only a request with suffixes is for a run, whose processes have names.
    names = process_names(folders) if request.get("suffixes") else []
    if request.get("process") and request["process"] not in names:
        allowed = "there are {}".format(", ".join(names)) if names else "there are none yet"
        sys.stderr.write("error: {} has no process {}; {}\n".format(request["node"], request["process"], allowed))
        sys.exit(2)
    nodes = nodes_in(folders[0])
    if request.get("on_node") and request["on_node"] not in nodes.values():
        allowed = "; there are {}".format(", ".join(sorted(set(nodes.values())))) if nodes else ": it is on one node"
        sys.stderr.write("error: {} has no node {}{}\n".format(request["node"], request["on_node"], allowed))
        sys.exit(2)
    # Path -> number of bytes that were read.
    read_bytes: dict[str, int] = {}
    for path in paths(folders, request):
        with open(path, "rb") as file:
            text = file.read().decode(errors="replace")
            read_bytes[path] = file.tell()
        say(nodes, request, path, text.splitlines()[-request["lines"] :])
    if names and not read_bytes and not request["follow"]:
        processes = request.get("process") or ", ".join(names)
        print("{}: {} wrote nothing".format(request["node"], processes))
    while request["follow"] and os.getppid() == parent:
        for path in paths(folders, request):
            with open(path, "rb") as file:
                file.seek(read_bytes.get(path, 0))
                new_bytes = file.read()
            # An unfinished line is read again when it is whole.
            whole_lines = new_bytes[: new_bytes.rfind(b"\n") + 1]
            read_bytes[path] = read_bytes.get(path, 0) + len(whole_lines)
            say(nodes, request, path, whole_lines.decode(errors="replace").splitlines())
        time.sleep(0.5)


def process_names(folders: "list[str]") -> "list[str]":
    """Return the names of the processes that have a log NAME.log."""
    names = set[str]()
    for folder in folders:
        if os.path.isdir(folder):
            names.update(file[: -len(".log")] for file in os.listdir(folder) if file.endswith(".log"))
    return sorted(names)


def nodes_in(folder: str) -> "dict[str, str]":
    try:
        with open(os.path.join(folder, NODES), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def node_of(nodes: "dict[str, str]", path: str) -> "str | None":
    """Return the node of the process that wrote a log; None if the run is on one node."""
    name = os.path.basename(path)
    return nodes.get(name[: -len(".log")], nodes.get("driver"))


def paths(folders: "list[str]", request: dict[str, Any]) -> "list[str]":
    """Return the paths of the logs that the request asks for, except empty files."""
    suffixes = tuple(request.get("suffixes") or SUFFIXES)
    process = request.get("process")
    nodes = nodes_in(folders[0])
    prefixes = () if request.get("suffixes") else PREFIXES
    log_paths = []
    for folder in folders:
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path = os.path.join(folder, name)
            if process:
                is_asked_for = name == f"{process}.log"
            else:
                is_asked_for = name.endswith(suffixes) or name.startswith(prefixes)
            if request.get("on_node") and node_of(nodes, path) != request["on_node"]:
                continue
            if is_asked_for and os.path.isfile(path) and os.path.getsize(path):
                log_paths.append(path)
    return log_paths


def say(nodes: "dict[str, str]", request: dict[str, Any], path: str, lines: "list[str]") -> None:
    """Print lines of a log, each after the names of its node and file."""
    name = os.path.basename(path)
    node = node_of(nodes, path) or request["node"]
    safe_lines = list[str]()
    for line in lines:
        # Remove colour codes: Ray writes them even into files.
        line = re.sub("\x1b\\[[0-9;]*m", "", line)
        # Replace other control characters, which may come from a reward's output or from a prompt in an error.
        safe_lines.append(re.sub(UNSAFE, "?", f"{node} {name} | {line}") + "\n")
    try:
        sys.stdout.write("".join(safe_lines))
        sys.stdout.flush()
    except OSError as error:
        sys.exit(f"error: the output cannot be written: {error.strerror}")
