"""Runs on a node of a Slurm job as the job's task there: starts the Ray node, stays beside it, and clears up behind it.

    task.py FOLDER      a folder that all nodes see, with plan.json, token, nodes/ and this program's neighbours

What it does and finds is in FOLDER/nodes/INDEX.json, its card, which is always whole. The first node of the job is the
head; the others join it once its card says that it is ready. The end of the head is the end of the job.
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


class Card:
    """What the others are told of this node."""

    def __init__(self, folder: str, index: int) -> None:
        self.path, self.facts = card_path(folder, index), {}  # type: tuple[str, dict[str, Any]]

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
    card = Card(folder, index)
    place = {"keep": os.path.join(folder, "logs", name), "cluster": plan["cluster"], "node": name}
    try:
        return live(folder, plan, index, card, place)
    except Exception as error:
        card.write(why=f"{type(error).__name__}: {error}")
        return 1
    finally:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        if "folder" in card.facts:
            clear_up({"folder": card.facts["folder"], **place}, card)


def live(folder: str, plan: "dict[str, Any]", index: int, card: Card, place: "dict[str, Any]") -> int:
    """From the check to the node's end; returns the exit code, which is 1 where the job is to end with it."""
    head, name = index == 0, place["node"]
    found = program("check")({"ports": plan["ports"] if head else []})
    card.write(name=name, host=name, found=found)
    first = None if head else joined(folder, plan["deadline_s"])
    address = own_address(name, first)
    values = {"name": name, "address": address, "head": first or "", "cpus": cores()}
    request = filled(plan["head" if head else "other"], values)
    with open(os.path.join(folder, "token")) as file:
        request.update(root=found["root"], folder=plan["folders"][index], token=file.read().strip())
    # Written before anything is there: whoever reads it knows where to look.
    card.write(address=address, folder=os.path.join(found["root"], request["folder"]))
    waited = started(request, plan, card, place)
    card.write(**waited)
    if not waited["ready"]:
        return 1
    while program_of("wait").lives(card.facts):
        time.sleep(1)
    with open(os.path.join(card.facts["folder"], "start.log"), errors="replace") as file:
        card.write(why="its Ray node ended: {}".format(program_of("wait").reason(file.read())))
    return int(head)


def started(request: "dict[str, Any]", plan: "dict[str, Any]", card: Card, place: "dict[str, Any]") -> Any:
    """What `wait.py` says; a node for which Ray's own deadline was too short is started once more."""
    for again in (True, False):
        card.write(**program("start")(request))
        port = card.facts["ports"].get("dashboard-port") if card.facts["found"]["dashboard"] else None
        waited = program("wait")({**card.facts, "port": port, "deadline_s": plan["deadline_s"]})
        if waited["ready"] or not again or plan["too_slow"] not in waited["why"]:
            break
        program("stop")({"folder": card.facts["folder"], **place})
    return waited


def clear_up(request: "dict[str, Any]", card: Card) -> None:
    """End the node; nobody else would. What fails once, as processes go meanwhile, is done again."""
    for again in (True, False):
        try:
            card.write(ended=program("stop")(request))
            return
        except Exception:
            if not again:
                raise


def joined(folder: str, deadline_s: float) -> str:
    """The address of the head, once it is ready. Raises RuntimeError if it will not be."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if os.path.exists(card_path(folder, 0)):
            head = read(card_path(folder, 0))
            if head.get("ready"):
                host = "[{}]".format(head["address"]) if ":" in head["address"] else head["address"]
                return "{}:{}".format(host, head["ports"]["port"])
            if head.get("why") or head.get("ended"):
                raise RuntimeError("the head did not start")
        time.sleep(0.5)
    raise RuntimeError(f"the head was not ready within {deadline_s:g} s")


def own_address(name: str, head: "str | None") -> str:
    """Where other nodes find this one: as its name says, or else by the way that leads to the head, or out."""
    if head is None:
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


def cores() -> str:
    """How many CPUs of this node the job has."""
    return os.environ.get("SLURM_CPUS_ON_NODE") or str(len(os.sched_getaffinity(0)))


def filled(request: "dict[str, Any]", values: "dict[str, str]") -> "dict[str, Any]":
    """The request with what only a node knows."""
    arguments = request["arguments"]
    for name, value in values.items():
        arguments = [each.replace("{" + name + "}", value) for each in arguments]
    return {**request, "arguments": arguments}


def card_path(folder: str, index: int) -> str:
    return os.path.join(folder, "nodes", f"{index}.json")


def read(path: str) -> Any:
    with open(path) as file:
        return json.load(file)


def program_of(name: str) -> Any:
    return importlib.import_module(name)


def program(name: str) -> Any:
    """run() of a neighbour of this program."""
    return program_of(name).run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
