"""Runs on another host, without the token: finds every open port of an address and tries to use each.

Arguments: address, a folder for a home. Prints JSON: ports, the answers of each port: {port: {probe: answer}}, and the
errors of Ray's own clients, with the seconds of a wrong token. Kept apart from the tests since Ray reads its
environment at import.
"""

import asyncio
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def main(address: str, home: str) -> None:
    wrong = Path(home) / "wrong"
    wrong.write_text("0" * 64)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    os.environ.clear()
    os.environ.update(kept, HOME=home)
    ports = asyncio.run(open_ports(address))
    answers = {port: called(address, port) | browsed(address, port) for port in ports}
    print(json.dumps({"ports": ports, "answers": answers, "wrong_token": with_a_wrong_token(address, wrong)}))


async def open_ports(address: str) -> list[int]:
    """Every TCP port that takes a connection."""
    gate = asyncio.Semaphore(500)
    found = []

    async def ask(port: int) -> None:
        async with gate:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 5)
            except (OSError, TimeoutError):
                return
            writer.close()
            found.append(port)

    await asyncio.gather(*(ask(port) for port in range(1, 65536)))
    return sorted(found)


def methods() -> list[str]:
    """Every remote procedure of Ray's own stubs, and of its object manager, which has no stubs in Python."""
    import ray

    folder = Path(ray.__file__).parent / "core" / "generated"
    text = "\n".join(path.read_text() for path in folder.glob("*_pb2_grpc.py"))
    own = {f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")}
    return sorted(own | set(re.findall(r"'(/ray\.rpc\.[\w.]+/\w+)'", text)))


def called(address: str, port: int) -> dict[str, str]:
    """The gRPC codes of every method's empty request, without the methods that the port lacks."""
    import grpc

    channel = grpc.insecure_channel(f"{address}:{port}")
    try:
        grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        return {}
    waiting = {name: channel.unary_unary(name).future(b"", timeout=10) for name in methods()}
    codes = {name: each.code().name for name, each in waiting.items()}
    return {name: code for name, code in codes.items() if code not in ("UNIMPLEMENTED", "UNAVAILABLE")}


def browsed(address: str, port: int) -> dict[str, str]:
    """The status of web pages, where something speaks HTTP."""
    found = {}
    for page in ("/", "/metrics", "/api/version", "/api/jobs/", "/logs"):
        try:
            with urllib.request.urlopen(f"http://{address}:{port}{page}", timeout=5) as answer:
                found[page] = str(answer.status)
        except urllib.error.HTTPError as error:
            found[page] = str(error.code)
        except (OSError, ValueError, http.client.HTTPException):
            continue
    return found


def with_a_wrong_token(address: str, token: Path) -> dict[str, Any]:
    """The answer of Ray's client of the head, and its seconds."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    began = time.monotonic()
    try:
        GcsClient(address=f"{address}:6379").get_all_node_info(timeout=5)
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - began}
    return {"error": "", "seconds": 0}


if __name__ == "__main__":
    main(*sys.argv[1:])
