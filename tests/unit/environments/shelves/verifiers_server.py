"""Environment server with the wire of verifiers 0.4, without the package. A row's `fate` says how its rollout goes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import msgpack
import zmq


def ask_for_a_turn(client: dict[str, Any], text: str) -> str:
    """Ask the session's endpoint for a turn, with the headers that the package sends."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {**client["headers"], "Authorization": "Bearer EMPTY", "Content-Type": "application/json"}
    with urlopen(Request(f"{client['base_url']}/chat/completions", body, headers)) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def changes_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Play a rollout. Return the changes of its traces."""
    task = request["task_data"]
    fate = task.get("fate")
    opened = {"version": 2 if fate == "newer" else 1, "id": "t", "verifiers": {"version": "0.9"}}
    reward = {"score": 0.5, "weight": 2.0}
    if fate is None:
        reward["score"] = float(ask_for_a_turn(request["client"], task["prompt"]) == task["answer"])
    outcome = {"rewards": {"right": reward, "brief": {"score": 1.0, "weight": 0.5}}, "ok": True, "is_timeout": False}
    if fate == "late":
        outcome = {"rewards": {}, "ok": False, "is_timeout": True, "stop_condition": "agent_timeout"}
    if fate == "unscored":
        outcome["rewards"] = {"right": None}
    changes = [{"trace": "t", "open": opened}, {"trace": "t", "set": outcome}]
    if fate == "error":
        changes[1]["errors"] = [{"type": "TaskError", "message": "no checker"}]
    if fate == "two":
        changes.append({"trace": "u", "open": opened, "set": outcome})
    if fate == "repeated":
        changes.insert(1, {"trace": "s", "open": opened})
        changes.insert(2, {"trace": "s", "discard": True})
    return changes


class Server:
    """The server, on one thread. It answers a rollout of fate "never" not at all."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.is_stopped = False
        # Ids of rollouts, and ids of cancelled rollouts.
        self.runs: list[str] = []
        self.cancelled: list[str] = []

    def serve(self) -> None:
        while not self.is_stopped:
            if self.socket.poll(50):
                client, request_id, method, payload = self.socket.recv_multipart()
                self.answer([client, request_id], method.decode(), msgpack.unpackb(payload))
        self.socket.close()

    def answer(self, route: list[bytes], method: str, request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"success": True, "error": None}
        if method == "run":
            self.runs.append(route[1].decode())
            if request["task_data"].get("fate") == "never":
                return
            if request["task_data"].get("fate") == "refused":
                reply = {"success": False, "error": "ValidationError: no column secret"}
            else:
                for change in changes_of(request):
                    self.socket.send_multipart([*route, b"delta", msgpack.packb(change)])
                reply |= {"head": {"ok": True, "errors": []}, "traces": []}
        if method == "cancel":
            self.cancelled.append(request["request_id"])
        self.socket.send_multipart([*route, b"reply", msgpack.packb(reply)])


@contextmanager
def served() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_stopped = True
        thread.join()
