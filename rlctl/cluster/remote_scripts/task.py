"""Task of a Slurm job on each of its nodes: starts the Ray node, waits for its end, and cleans up.

    python -m rlctl.cluster.remote_scripts.task FOLDER   a folder that all nodes see, with plan.json, token and nodes/

FOLDER/nodes/INDEX.json is the node's report, written atomically. The first node of the job is the head. The others join
when the head's report says that it is ready. The job ends when the head ends.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rlctl.cluster.remote_scripts import check, node
from rlctl.utils.files import write_whole

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Report:
    """Report of this node for the other nodes and the submitting machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}

    def write(self, **facts: Any) -> None:
        """Add facts to the report and write it."""
        self.facts.update(facts)
        write_whole(self.path, json.dumps(self.facts))


def main(folder: Path) -> int:
    """Run the task and return the exit code. 1 ends the whole job."""
    index = int(os.environ["SLURM_NODEID"])
    name = os.environ["SLURMD_NODENAME"]
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    # SystemExit leads to the clean-up below, and to an exit code that does not end the other nodes.
    for number in ENDINGS:
        signal.signal(number, lambda *_: sys.exit(0))
    report = Report(folder / "nodes" / f"{index}.json")
    place = {"keep": str(folder / "logs" / name), "cluster": plan["cluster"], "node": name}
    try:
        return live(folder, plan, index, report, place)
    except Exception as error:
        report.write(why=f"{type(error).__name__}: {error}")
        return 1
    finally:
        # A second signal must not interrupt the clean-up.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        if "folder" in report.facts:
            clean_up({"folder": report.facts["folder"], **place}, report)


def live(folder: Path, plan: dict[str, Any], index: int, report: Report, place: dict[str, Any]) -> int:
    """Check the host, start the node and wait for its end. Return the exit code."""
    is_head = index == 0
    name = place["node"]
    host_facts = check.run({"ports": plan["ports"] if is_head else []})
    report.write(name=name, host=name, found=host_facts)
    head_address = "" if is_head else wait_for_head(folder / "nodes" / "0.json", plan["deadline_s"])
    address = own_address(name, head_address)
    # Number of CPUs that the job has on this node.
    cpus = os.environ.get("SLURM_CPUS_ON_NODE") or str(len(os.sched_getaffinity(0)))
    request = plan["head" if is_head else "other"]
    # Placeholder in the plan's arguments -> value on this node.
    facts = {"{name}": name, "{address}": address, "{head}": head_address, "{cpus}": cpus}
    for placeholder, fact in facts.items():
        request["arguments"] = [argument.replace(placeholder, fact) for argument in request["arguments"]]
    token = (folder / "token").read_text(encoding="utf-8").strip()
    request.update(root=host_facts["root"], folder=plan["folders"][index], token=token)
    # The report names the folder before it is created, so that its reader can always find it.
    report.write(address=address, folder=os.path.join(host_facts["root"], request["folder"]))
    waited = start(request, plan, report, place)
    report.write(**waited)
    if not waited["ready"]:
        return 1
    while node.lives(report.facts):
        time.sleep(1)
    log = Path(report.facts["folder"], "start.log").read_text(encoding="utf-8", errors="replace")
    report.write(why=f"its Ray node ended: {node.reason(log)}")
    # Only the head's end ends the job.
    return int(is_head)


def start(request: dict[str, Any], plan: dict[str, Any], report: Report, place: dict[str, Any]) -> dict[str, Any]:
    """Start the node, and try once more if Ray's own time limit was too short. Return the reply of `node.wait`."""
    for is_last_try in (False, True):
        report.write(**node.start(request))
        port = report.facts["ports"].get("dashboard-port") if report.facts["found"]["dashboard"] else None
        waited = node.wait({**report.facts, "port": port, "deadline_s": plan["deadline_s"]})
        if waited["ready"] or is_last_try or plan["too_slow"] not in waited["why"]:
            break
        node.stop({"folder": report.facts["folder"], **place})
    return waited


def clean_up(request: dict[str, Any], report: Report) -> None:
    """Stop the node, because nobody else does. Try twice, since processes that end meanwhile may cause an error."""
    for is_last_try in (False, True):
        try:
            report.write(ended=node.stop(request))
            return
        except Exception:
            if is_last_try:
                raise


def wait_for_head(report: Path, deadline_s: float) -> str:
    """Wait until the head is ready and return its host:port. Raises RuntimeError if it failed or is too late."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if report.exists():
            head = json.loads(report.read_text(encoding="utf-8"))
            if head.get("ready"):
                host = f"[{head['address']}]" if ":" in head["address"] else head["address"]
                return f"{host}:{head['ports']['port']}"
            if head.get("why") or head.get("ended"):
                raise RuntimeError("the head did not start")
        time.sleep(0.5)
    raise RuntimeError(f"the head was not ready within {deadline_s:g} s")


def own_address(name: str, head: str) -> str:
    """Return the address at which other nodes reach this one. head: host:port of the head; empty on the head itself.

    On the head this is the address of its host name, unless that is loopback: then the address that it uses for
    connections to the outside. On another node this is the address that it uses for connections to the head.
    """
    if not head:
        for candidate in (name, socket.gethostname()):
            try:
                address = socket.gethostbyname(candidate)
            except OSError:
                continue
            if not address.startswith("127."):
                return address
    # 192.0.2.1 is an address for documentation: it is outside every network.
    host, port = head.rsplit(":", 1) if head else ("192.0.2.1", "9")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
