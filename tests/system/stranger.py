"""A program for another host, without the token: it finds every open port of an address and tries to use each.

Arguments: address, a folder for a home. It prints JSON: ports, the answers of each port: {port: {probe: answer}}, and
the error of Ray's own client with a wrong token, with its seconds. It is apart from the tests since Ray reads its
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
    wrong_token = Path(home) / "wrong"
    wrong_token.write_text("0" * 64)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    os.environ.clear()
    os.environ.update(environment, HOME=home)
    ports = asyncio.run(find_open_ports(address))
    answers = {port: call_methods(address, port) | browse_pages(address, port) for port in ports}
    refusal = try_wrong_token(address, wrong_token)
    print(json.dumps({"ports": ports, "answers": answers, "wrong_token": refusal}))


async def find_open_ports(address: str) -> list[int]:
    """Find every TCP port that takes a connection."""
    gate = asyncio.Semaphore(500)
    open_ports = []

    async def knock(port: int) -> None:
        async with gate:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 5)
            except (OSError, TimeoutError):
                return
            writer.close()
            open_ports.append(port)

    await asyncio.gather(*(knock(port) for port in range(1, 65536)))
    return sorted(open_ports)


def find_methods() -> list[str]:
    """Find every remote procedure of Ray's own stubs, and of its object manager, which has no stubs in Python."""
    import ray

    folder = Path(ray.__file__).parent / "core" / "generated"
    text = "\n".join(path.read_text() for path in folder.glob("*_pb2_grpc.py"))
    of_object_manager = {f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")}
    return sorted(of_object_manager | set(re.findall(r"'(/ray\.rpc\.[\w.]+/\w+)'", text)))


def call_methods(address: str, port: int) -> dict[str, str]:
    """Return the gRPC codes of every method's empty request, without the methods that the port lacks."""
    import grpc

    channel = grpc.insecure_channel(f"{address}:{port}")
    try:
        grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        return {}
    calls = {name: channel.unary_unary(name).future(b"", timeout=10) for name in find_methods()}
    codes = {name: call.code().name for name, call in calls.items()}
    return {name: code for name, code in codes.items() if code not in ("UNIMPLEMENTED", "UNAVAILABLE")}


def browse_pages(address: str, port: int) -> dict[str, str]:
    """Return path -> HTTP status of some web pages of a port; empty if the port does not speak HTTP."""
    statuses = {}
    for page in ("/", "/metrics", "/api/version", "/api/jobs/", "/logs"):
        try:
            with urllib.request.urlopen(f"http://{address}:{port}{page}", timeout=5) as answer:
                statuses[page] = str(answer.status)
        except urllib.error.HTTPError as error:
            statuses[page] = str(error.code)
        except (OSError, ValueError, http.client.HTTPException):
            continue
    return statuses


def try_wrong_token(address: str, token: Path) -> dict[str, Any]:
    """Connect Ray's client to the head with a wrong token. Return its error, and the seconds until then."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    start = time.monotonic()
    try:
        GcsClient(address=f"{address}:6379").get_all_node_info(timeout=5)
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start}
    return {"error": "", "seconds": 0}


if __name__ == "__main__":
    main(*sys.argv[1:])
