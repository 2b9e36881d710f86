"""Runs on a node of a Slurm job as the job's task there: starts the Ray node, stays with it, and cleans up after it.

    task.py FOLDER      a folder that all nodes see, with plan.json, token, nodes/ and this program's neighbours

FOLDER/nodes/INDEX.json is the node's report, which is always whole. The first node of the job is the head; the others
join it once its report says that it is ready. The end of the head is the end of the job.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Report:
    """Facts that this node tells the others and the machine that submitted the job."""

    def __init__(self, folder: str, index: int) -> None:
        self.path = report_path(folder, index)
        self.facts = {}  # type: dict[str, Any]

    def write(self, **facts: Any) -> None:
        self.facts.update(facts)
        with open(self.path + ".tmp", "w") as file:
            json.dump(self.facts, file)
        os.replace(self.path + ".tmp", self.path)


def main(folder: str) -> int:
    index, name = int(os.environ["SLURM_NODEID"]), os.environ["SLURMD_NODENAME"]
    plan = read(os.path.join(folder, "plan.json"))
    for number in ENDINGS:
        signal.signal(number, lambda *_: sys.exit(0))
    report = Report(folder, index)
    place = {"keep": os.path.join(folder, "logs", name), "cluster": plan["cluster"], "node": name}
    try:
        return live(folder, plan, index, report, place)
    except Exception as error:
        report.write(why=f"{type(error).__name__}: {error}")
        return 1
    finally:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        if "folder" in report.facts:
            clean_up({"folder": report.facts["folder"], **place}, report)


def live(folder: str, plan: "dict[str, Any]", index: int, report: Report, place: "dict[str, Any]") -> int:
    """Check, start the node and wait for its end; return the exit code, which is 1 where the job is to end with it."""
    head, name = index == 0, place["node"]
    found = program("check").run({"ports": plan["ports"] if head else []})
    report.write(name=name, host=name, found=found)
    first = "" if head else wait_for_head(folder, plan["deadline_s"])
    address = own_address(name, first)
    # How many CPUs of this node the job has.
    cpus = os.environ.get("SLURM_CPUS_ON_NODE") or str(len(os.sched_getaffinity(0)))
    request = plan["head" if head else "other"]
    # Placeholders for facts of a node.
    for placeholder, value in {"{name}": name, "{address}": address, "{head}": first, "{cpus}": cpus}.items():
        request["arguments"] = [each.replace(placeholder, value) for each in request["arguments"]]
    with open(os.path.join(folder, "token")) as file:
        request.update(root=found["root"], folder=plan["folders"][index], token=file.read().strip())
    # Written before anything is there: whoever reads it knows where to look.
    report.write(address=address, folder=os.path.join(found["root"], request["folder"]))
    waited = start(request, plan, report, place)
    report.write(**waited)
    if not waited["ready"]:
        return 1
    while program("node").lives(report.facts):
        time.sleep(1)
    with open(os.path.join(report.facts["folder"], "start.log"), errors="replace") as file:
        report.write(why="its Ray node ended: {}".format(program("node").reason(file.read())))
    return int(head)


def start(request: "dict[str, Any]", plan: "dict[str, Any]", report: Report, place: "dict[str, Any]") -> Any:
    """Return the result of `wait`; a node for which Ray's own deadline was too short is started once more."""
    for again in (True, False):
        report.write(**program("node").start(request))
        port = report.facts["ports"].get("dashboard-port") if report.facts["found"]["dashboard"] else None
        waited = program("node").wait({**report.facts, "port": port, "deadline_s": plan["deadline_s"]})
        if waited["ready"] or not again or plan["too_slow"] not in waited["why"]:
            break
        program("node").stop({"folder": report.facts["folder"], **place})
    return waited


def clean_up(request: "dict[str, Any]", report: Report) -> None:
    """End the node; nobody else would. What fails once, as processes end meanwhile, is tried again."""
    for again in (True, False):
        try:
            report.write(ended=program("node").stop(request))
            return
        except Exception:
            if not again:
                raise


def wait_for_head(folder: str, deadline_s: float) -> str:
    """Return the address of the head, once it is ready. Raises RuntimeError if it will not be."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if os.path.exists(report_path(folder, 0)):
            head = read(report_path(folder, 0))
            if head.get("ready"):
                host = "[{}]".format(head["address"]) if ":" in head["address"] else head["address"]
                return "{}:{}".format(host, head["ports"]["port"])
            if head.get("why") or head.get("ended"):
                raise RuntimeError("the head did not start")
        time.sleep(0.5)
    raise RuntimeError(f"the head was not ready within {deadline_s:g} s")


def own_address(name: str, head: str) -> str:
    """Return where other nodes find this one: by its name, or else by the way that leads to the head, or out."""
    if not head:
        for candidate in (name, socket.gethostname()):
            try:
                found = socket.gethostbyname(candidate)
            except OSError:
                continue
            if not found.startswith("127."):
                return found
    host, port = head.rsplit(":", 1) if head else ("192.0.2.1", "9")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])


def report_path(folder: str, index: int) -> str:
    return os.path.join(folder, "nodes", f"{index}.json")


def read(path: str) -> Any:
    with open(path) as file:
        return json.load(file)


def program(name: str) -> Any:
    """Return a neighbour of this program, as a module."""
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
