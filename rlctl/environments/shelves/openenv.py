"""Environment on an OpenEnv server: each episode is a session of the server, over one WebSocket.

It speaks the wire of the package `openenv` 0.10 (`/schema` and `/ws`). The package stays with the server.
A server with MCP tools gives them to the model as tools. An action of one text field takes the model's message. Any
other action is a tool, `act`, with the fields of the action as parameters.
"""

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from rlctl.environments.outcomes import InfrastructureError
from rlctl.environments.tool_schema import Schema

# Name of the tool that sends an action of several fields.
ACT = "act"
PROTOCOL = "this shelf speaks the protocol of openenv 0.10"
# Fields of every action and observation that are no part of the conversation.
_SHARED_FIELDS = ("done", "reward", "metadata")
# Groups whose first observation is remembered.
_MAX_GROUPS = 512
# Most bytes of one message of the server.
_MAX_MESSAGE = 16 << 20


@dataclass(frozen=True)
class Actions:
    """The way a model acts on a server."""

    # Name of the field that takes the model's message; None if actions are calls of tools.
    text_field: str | None
    tools: list[Schema]


# Address of a server -> its actions; address, seed and columns of a group -> the group's first observation.
_actions_by_url: dict[str, Actions] = {}
_first_observations: OrderedDict[str, str] = OrderedDict()


class OpenEnv:
    """One session of a server.

    url: address of the server. field: field of the observation that the model reads; None takes the only field, or
    else the whole observation as JSON. reward: `sum` adds the rewards of all steps, `last` takes the last one.
    wait_s: seconds that an episode waits for a free session of the server.
    """

    def __init__(self, url: str, field: str | None = None, reward: str = "sum", wait_s: float = 30.0) -> None:
        if reward not in ("sum", "last"):
            raise InfrastructureError(f"reward must be sum or last, not {reward}")
        self._session = _Session(url.rstrip("/"), wait_s)
        self._field = field
        self._adds_rewards = reward == "sum"
        self._rewards: list[float] = []
        self._is_done = False
        self._actions = Actions(None, [])

    @classmethod
    def _served_tools(cls, **arguments: Any) -> list[Schema]:
        """Return the schemas of the server's tools. rlctl calls this before a run. Raises InfrastructureError."""
        return asyncio.run(cls(**arguments)._read_tools())

    def __getattr__(self, name: str) -> Any:
        """Return the function that calls a tool of the server."""
        if name.startswith("_") or name not in [tool["function"]["name"] for tool in self._actions.tools]:
            raise AttributeError(f"the server has no tool {name}")
        return partial(self._call_tool, name)

    async def reset(self, seed: int | None = None, **row: Any) -> str | None:
        """Begin an episode. Members of a group send the same seed and columns."""
        await self._session.open()
        self._actions = _actions_by_url.get(self._session.url) or await _read_actions(self._session)
        columns = {"seed": seed, **row}
        text = self._read_observation(await self._session.ask("reset", columns))
        self._rewards.clear()  # Some servers send a reward of 0 with the first observation.
        _check_same_start(self._session.url, columns, text or "")
        return text

    async def step(self, message: str) -> str | None:
        """Send the model's message as an action. Return the observation, or None at the end of the episode."""
        if self._actions.text_field is None or self._is_done:
            return None
        text = self._read_observation(await self._session.ask("step", {self._actions.text_field: message}))
        return None if self._is_done else text

    def get_reward(self) -> float:
        """Return the rewards of the steps. An episode that a budget has cut may have earned nothing yet."""
        if self._is_done and not self._rewards:
            raise InfrastructureError(f"{self._session.url} ended an episode, and gave no reward")
        if not self._rewards:
            return 0.0
        return math.fsum(self._rewards) if self._adds_rewards else self._rewards[-1]

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _read_tools(self) -> list[Schema]:
        try:
            await self._session.open()
            return (await _read_actions(self._session)).tools
        finally:
            await self._session.close()

    async def _call_tool(self, name: str, **arguments: Any) -> str:
        if self._is_done:
            return "The episode is over."
        action = arguments if name == ACT else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        data = await self._session.ask("step", action)
        text = self._read_observation(data)
        if error := data["observation"].get("error"):
            raise ValueError(error.get("message", str(error)) if isinstance(error, dict) else str(error))
        return text or ""

    def _read_observation(self, data: Mapping[str, Any]) -> str | None:
        """Keep the reward and the end of a step. Return the observation as the model reads it."""
        self._is_done = self._is_done or bool(data.get("done"))
        reward = data.get("reward")
        if reward is not None:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise InfrastructureError(f"{self._session.url} gave a reward that is no finite number: {reward!r}")
            self._rewards.append(float(reward))
        observation = {name: value for name, value in data["observation"].items() if name not in _SHARED_FIELDS}
        if self._field is not None:
            if self._field not in observation:
                fields = ", ".join(observation)
                raise InfrastructureError(f"the observation has no field {self._field}: its fields are {fields}")
            return _as_text(observation[self._field])
        if "tool_name" in observation and "result" in observation:
            return _as_text(_unwrap_result(observation["result"]))
        if len(observation) == 1:
            return _as_text(*observation.values())
        return _as_text(observation) if observation else None


class _Session:
    """A WebSocket to a server, which has one environment at its end."""

    def __init__(self, url: str, wait_s: float) -> None:
        self.url = url
        self._wait_s = wait_s
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> None:
        """Open the session. Wait while the server has no free one. Raises InfrastructureError."""
        self._client = aiohttp.ClientSession()
        address = f"ws{self.url.removeprefix('http')}/ws"
        clock = asyncio.get_running_loop()
        ends_at = clock.time() + self._wait_s
        while True:
            try:
                self._socket = await self._client.ws_connect(address, max_msg_size=_MAX_MESSAGE)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise InfrastructureError(f"no OpenEnv server at {self.url} ({PROTOCOL}): {reason}") from error
            # A server without a free session says so, and closes. Any other server answers with the state.
            answer = await self._send_and_receive({"type": "state"})
            data = answer.get("data") or {}
            code = data.get("code") if answer.get("type") == "error" else None
            if code in ("FACTORY_ERROR", "SESSION_ERROR"):
                raise InfrastructureError(f"{self.url} made no environment: {data.get('message')}")
            if code != "CAPACITY_REACHED":
                return
            if clock.time() > ends_at:
                sessions = f"none of its {data.get('max_sessions')} sessions was free for {self._wait_s:g} s"
                raise InfrastructureError(f"{self.url}: {sessions}; raise max_concurrent_envs of the server")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._client is not None:
            await self._client.close()

    async def read_schema(self) -> dict[str, Any]:
        """Return the JSON schema of an action. Raises InfrastructureError."""
        assert self._client is not None
        found: Any = None
        try:
            async with self._client.get(f"{self.url}/schema") as response:
                found = await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError) as error:
            raise InfrastructureError(f"{self.url}/schema cannot be read ({PROTOCOL}): {error}") from error
        action = found.get("action") if isinstance(found, dict) else None
        if not isinstance(action, dict) or not isinstance(action.get("properties"), dict):
            raise InfrastructureError(f"{self.url}/schema describes no action: {PROTOCOL}")
        return action

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of its answer.

        Raises InfrastructureError, or ValueError for an action that does not fit the server's schema.
        """
        answer = await self._send_and_receive({"type": kind, "data": dict(data)})
        found = answer.get("data")
        expected_type = "mcp" if kind == "mcp" else "observation"
        if answer.get("type") == "error" and isinstance(found, dict):
            reason = f"{found.get('message')}{_describe_errors(found.get('errors'))}"
            if kind == "step" and found.get("code") == "VALIDATION_ERROR":
                raise ValueError(reason)
            raise InfrastructureError(f"{self.url} failed to {kind} ({found.get('code')}): {reason}")
        if answer.get("type") != expected_type or not isinstance(found, dict):
            raise InfrastructureError(f"{self.url} answered {kind} with {answer.get('type')}, not {expected_type}")
        if kind != "mcp" and not isinstance(found.get("observation"), dict):
            raise InfrastructureError(f"{self.url} answered {kind} without an observation: {PROTOCOL}")
        return found

    async def _send_and_receive(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        try:
            await self._socket.send_json(message)
            received = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InfrastructureError(f"{self.url} closed the session of an episode: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self.url} closed the session of an episode")
        answer = json.loads(received.data)
        if not isinstance(answer, dict):
            raise InfrastructureError(f"{self.url} sent a message that is no object: {PROTOCOL}")
        return answer


async def _read_actions(session: _Session) -> Actions:
    """Find out how a model acts on a server. Raises InfrastructureError."""
    schema = await session.read_schema()
    fields = {name: field for name, field in schema["properties"].items() if name not in _SHARED_FIELDS}
    required = [name for name in schema.get("required", []) if name in fields]
    filled_fields = required or list(fields)
    text_field = None
    tools = []
    if not fields or "type" in fields or "tool_name" in fields:
        tools = await _list_mcp_tools(session)
    if not tools and len(filled_fields) == 1 and fields[filled_fields[0]].get("type") == "string":
        text_field = filled_fields[0]
    elif not tools:
        parameters: dict[str, Any] = {"type": "object", "properties": fields, "required": required}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        tools = [_tool_schema(ACT, schema.get("description") or "Act in the environment.", parameters)]
    _actions_by_url[session.url] = Actions(text_field, tools)
    return _actions_by_url[session.url]


async def _list_mcp_tools(session: _Session) -> list[Schema]:
    answer = await session.ask("mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1})
    tools = []
    for tool in (answer.get("result") or {}).get("tools", []):
        parameters = tool.get("inputSchema") or tool.get("input_schema") or {}
        tools.append(_tool_schema(tool["name"], tool.get("description") or tool["name"], parameters))
    return tools


def _check_same_start(url: str, columns: Mapping[str, Any], text: str) -> None:
    """Raise InfrastructureError if another member of the group, in this process, began with another observation."""
    group = json.dumps([url, columns], sort_keys=True, default=str)
    first_text = _first_observations.setdefault(group, text)
    while len(_first_observations) > _MAX_GROUPS:
        _first_observations.popitem(last=False)
    if first_text != text:
        remedy = "its reset must draw from the seed that it gets, or a column of the row must name the task"
        raise InfrastructureError(f"{url} began two episodes of a group with different observations: {remedy}")


def _tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    filled = {"type": "object", "properties": {}, **parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": filled}}


def _unwrap_result(result: Any) -> Any:
    """Return the value in a tool's result, which FastMCP wraps in content blocks."""
    if not isinstance(result, dict):
        return result
    if result.get("data") is not None:
        return result["data"]
    blocks = result.get("content")
    if isinstance(blocks, list) and all(isinstance(block, dict) and "text" in block for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return result


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _describe_errors(errors: Any) -> str:
    """Return the fields that the server refused, as text behind a message."""
    if not isinstance(errors, list) or not errors:
        return ""
    lines = [f"{'.'.join(map(str, error.get('loc', ())))} {error.get('msg')}" for error in errors]
    return f": {'; '.join(lines)}"
