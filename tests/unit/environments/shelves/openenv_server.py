"""Server with the wire of OpenEnv 0.10, without the package: a counter that is brought to 3, in three kinds.

A test can make it misbehave by the columns of `reset`.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

TEXT = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
BOARD = {"description": "Move.", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
MCP = {"properties": {"type": {"type": "string"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
ADD = {
    "name": "add",
    "description": "Add.",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}


class Counter:
    """One session."""

    def __init__(self) -> None:
        self.count = 0
        self.row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        self.row = row
        Server.num_resets += 1
        text = f"seed {row['seed']}, {Server.num_resets}" if row.get("draws") else f"seed {row['seed']}"
        return observation({"text": text}, reward=0.0)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.row.get("breaks"):
            raise RuntimeError("the board is gone")
        if self.row.get("ends"):
            return observation({"text": ""}, done=True)
        if "x" in action:
            return observation({"board": [action["x"]], "turn": "black"}, done=True, reward=2)
        if action.get("tool_name") == "add":
            if "n" not in action["arguments"]:
                return observation({"tool_name": "add", "result": None, "error": {"message": "n is missing"}})
            self.count += action["arguments"]["n"]
            result = {"tool_name": "add", "result": {"data": self.count}, "error": None}
            return observation(result, reward=float(self.count == 3))
        self.count += len(action["message"])
        return observation({"text": str(self.count)}, done=self.count >= 3, reward=0.5 if self.count < 3 else 1)


def observation(fields: dict[str, Any], done: bool = False, reward: float | None = None) -> dict[str, Any]:
    return {"observation": {**fields, "metadata": {}}, "done": done, "reward": reward}


class Server:
    """The server: `action` is the schema of its actions, `max_sessions` its bound."""

    num_resets = 0

    def __init__(self, action: dict[str, Any], max_sessions: int) -> None:
        self.action = action
        self.max_sessions = max_sessions
        self.num_sessions = 0

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def serve_session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_sessions >= self.max_sessions:
            await socket.send_json(error("CAPACITY_REACHED", max_sessions=self.max_sessions))
            await socket.close()
            return socket
        self.num_sessions += 1
        counter = Counter()
        async for received in socket:
            message = json.loads(received.data)
            if message["type"] == "close" or counter.row.get("leaves"):
                break
            await socket.send_json(answer(counter, message))
        self.num_sessions -= 1
        await socket.close()
        return socket


def answer(counter: Counter, message: dict[str, Any]) -> dict[str, Any]:
    data = message.get("data", {})
    match message["type"]:
        case "state":
            return {"type": "state", "data": {"step_count": 0}}
        case "mcp":
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [ADD]}}}
        case "reset":
            return {"type": "observation", "data": counter.reset(data)}
    if "x" in data and not isinstance(data["x"], int):
        return error("VALIDATION_ERROR", errors=[{"loc": ["x"], "msg": "is no integer"}])
    try:
        return {"type": "observation", "data": counter.step(data)}
    except RuntimeError as failure:
        return error("EXECUTION_ERROR", message=str(failure))


def error(code: str, message: str = "no", **fields: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **fields}}


@contextmanager
def served(action: dict[str, Any], max_sessions: int = 64) -> Iterator[str]:
    """Serve in a thread, and return the address."""
    server = Server(action, max_sessions)
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/schema", server.schema), web.get("/ws", server.serve_session)])
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
