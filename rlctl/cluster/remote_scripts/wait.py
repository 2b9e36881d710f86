"""Runs on a host: waits until the node started there is up, or says why it ended.

request: folder, pid, create_time, port (of the dashboard to wait for, or null), head (host and port that it joins;
null or left out: not asked), deadline_s. The reply: ready, why (the last lines of its log), dashboard (whether that
port answers).
"""

import json  # noqa: F401  (used by what is put behind this program)
import os
import re
import shutil
import socket
import time
from typing import Any

from rlctl.cluster.remote_scripts.shared import lives

LEAST_DISK = 1 << 20
LONGEST_SILENCE_S = 6.0


def run(request: dict[str, Any]) -> dict[str, Any]:
    parent, heard = os.getppid(), time.monotonic()
    end = heard + request["deadline_s"]
    log = os.path.join(request["folder"], "start.log")
    while time.monotonic() < end and os.getppid() == parent:
        with open(log, errors="replace") as file:
            text = file.read()
        if "Ray runtime started" in text:
            return {"ready": True, "why": "", "dashboard": waits_for(request["port"], request, end)}
        if not lives(request):
            return failed(reason(text))
        # Of what follows Ray's processes say nothing: they wait for each other until the deadline.
        if shutil.disk_usage(request["folder"]).free < LEAST_DISK:
            return failed("disk full: nothing left for Ray's files in " + os.path.dirname(request["folder"]))
        head = request.get("head")
        if head is None or answers(*head):
            heard = time.monotonic()
        elif time.monotonic() - heard > LONGEST_SILENCE_S:
            host, port = head
            return failed(f"the head does not answer at port {port} of {host}: it ended, or a firewall is between them")
        time.sleep(0.3)
    return failed("not up within {:g} s (start_timeout_s)".format(request["deadline_s"]))


def failed(why: str) -> dict[str, Any]:
    return {"ready": False, "why": why, "dashboard": False}


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
    """The line that explains an end best: what was raised last, else the last line."""
    lines = [line.split(" -- ")[-1].strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (raised or lines or ["its log is empty"])[-1]
