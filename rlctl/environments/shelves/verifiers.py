"""Agent of verifiers v1: its environment server plays the rollout, and asks the session endpoint for each turn.

It speaks the wire of the package `verifiers` 0.4: ZeroMQ and msgpack. The package stays with the server. A row is the
dump of a `TaskData`. The server's trace has the rewards, and its errors fail the rollout.
"""

import asyncio
import atexit
import contextlib
import math
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import zmq
import zmq.asyncio

from rlctl.environments.outcomes import InfrastructureError

if TYPE_CHECKING:
    from rlctl.environments.agents.agent_episode import AgentTask

# Version of a trace's schema in the package 0.4.
TRACE_VERSION = 1
PROTOCOL = "this shelf speaks the protocol of verifiers 0.4"
# Seconds within which a server answers a question about its health, and pause between two questions.
_HEALTH_S = 20.0
_HEALTH_PAUSE_S = 5.0
# The server reads its key from a variable of this name. None has it: the session's key is in a header.
_NO_VARIABLE = "RLCTL_NO_API_KEY"


async def run(task: "AgentTask", base_url: str, api_key: str, *, address: str) -> dict[str, float]:
    """Have the server play one rollout. Return its rewards by name, each times its weight.

    address: address of the server, such as tcp://127.0.0.1:5000. Raises InfrastructureError.
    """
    server = _Server.at(address)
    client = {"type": "eval", "base_url": base_url, "api_key_var": _NO_VARIABLE, "headers": {"x-api-key": api_key}}
    request = {"task_data": task.row, "client": client, "model": "policy", "sampling": {}}
    await server.check_health()
    return await server.play(request)


class _Server:
    """Connection to one environment server, shared by all rollouts of this process on its event loop."""

    _servers: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], "_Server"]] = {}

    def __init__(self, address: str) -> None:
        self._address = address
        # The context lives as long as the process, which would not end while a socket is open.
        context = zmq.asyncio.Context()
        atexit.register(context.destroy, linger=0)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        # Request's id -> its answer, and for a rollout the changes of its traces that have come so far.
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._traces: dict[str, dict[str, dict[str, Any]]] = {}
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    def at(cls, address: str) -> "_Server":
        """Return the connection of this event loop to an address. Raises InfrastructureError for a wrong address."""
        key = (asyncio.get_running_loop(), address)
        try:
            if key not in cls._servers:
                cls._servers[key] = cls(address)
            return cls._servers[key]
        except zmq.ZMQError as error:
            raise InfrastructureError(f"{address} is no address of a server, as tcp://127.0.0.1:5000") from error

    async def check_health(self) -> None:
        """Raise InfrastructureError unless the server answers."""
        try:
            answer = await asyncio.wait_for(self._ask("health", {}), _HEALTH_S)
        except TimeoutError as error:
            reason = f"no environment server of verifiers answers at {self._address} within {_HEALTH_S:g} s"
            raise InfrastructureError(f"{reason}; {PROTOCOL}") from error
        if not answer.get("success"):
            raise InfrastructureError(f"{self._address} is not healthy: {answer.get('error')}; {PROTOCOL}")

    async def play(self, request: Mapping[str, Any]) -> dict[str, float]:
        """Play a rollout, and watch the server's health. Return the rewards. Raises InfrastructureError."""
        traces: dict[str, dict[str, Any]] = {}
        playing = asyncio.create_task(self._ask("run", request, traces))
        try:
            while not playing.done():
                await asyncio.wait([playing], timeout=_HEALTH_PAUSE_S)
                if not playing.done():
                    await self.check_health()
            return self._read_rewards(playing.result(), traces)
        finally:
            playing.cancel()

    async def _ask(
        self, method: str, request: Mapping[str, Any], traces: dict[str, dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Send a request and return its answer. A rollout that is cancelled is cancelled on the server too.

        traces: takes the changes of a rollout's traces.
        """
        request_id = uuid.uuid4().hex
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        if traces is not None:
            self._traces[request_id] = traces
        try:
            await self._send_request(request_id, method, request)
            return await answer
        except asyncio.CancelledError:
            if method == "run":
                await self._send_request(uuid.uuid4().hex, "cancel", {"request_id": request_id})
            raise
        finally:
            self._answers.pop(request_id, None)
            self._traces.pop(request_id, None)

    async def _send_request(self, request_id: str, method: str, request: Mapping[str, Any]) -> None:
        frames = [request_id.encode(), method.encode(), msgpack.packb(dict(request), use_bin_type=True)]
        await self._socket.send_multipart(frames)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                continue  # The health of such a server ends its rollouts.
            request_id, kind, payload = frames
            # An answer may come after its rollout was cancelled, and a frame that cannot be read is no answer.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, asyncio.InvalidStateError):
                message = msgpack.unpackb(payload, raw=False, strict_map_key=False)
                if kind == b"delta":
                    traces = self._traces[request_id.decode()]
                    _add_change(traces, message)
                    if clash := _find_clash(traces[message["trace"]]):
                        # Said before the first turn: the trial before a run then ends it.
                        self._answers[request_id.decode()].set_exception(InfrastructureError(clash))
                elif not self._answers[request_id.decode()].done():
                    self._answers[request_id.decode()].set_result(message)

    def _read_rewards(self, answer: Mapping[str, Any], traces: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Return the rewards of a rollout's one trace. Raises InfrastructureError for a failed rollout."""
        if not answer.get("success") or not isinstance(answer.get("head"), dict):
            raise InfrastructureError(f"{self._address} played no rollout: {answer.get('error')}; {PROTOCOL}")
        errors = [*answer["head"].get("errors", [])]
        for trace in traces.values():
            errors += trace["errors"]
        if errors:
            # Also those of an attempt that the server repeated: its turns are in the same session.
            reasons = [f"{error.get('type')}: {error.get('message')}" for error in errors]
            raise InfrastructureError(f"the rollout failed on {self._address}: {'; '.join(reasons)}")
        if len(traces) != 1:
            raise InfrastructureError(f"the rollout has {len(traces)} traces: this shelf trains one agent alone")
        (trace,) = traces.values()
        return _weighted_rewards(trace)


def _add_change(traces: dict[str, dict[str, Any]], change: Mapping[str, Any]) -> None:
    """Add a change to the traces of a rollout. Only its outcome is kept."""
    trace_id = change["trace"]
    if change.get("discard"):
        # The server repeats the rollout. The session has the turns of both attempts.
        traces[trace_id]["errors"].append({"type": "retry", "message": "the server repeated the rollout"})
        return
    trace = traces.setdefault(trace_id, {**change.get("open", {}), "errors": []})
    trace["errors"] += change.get("errors", [])
    trace.update(change.get("set", {}))


def _find_clash(trace: Mapping[str, Any]) -> str:
    """Return the reason why a trace cannot be read, or an empty text."""
    if trace["version"] == TRACE_VERSION:
        return ""
    package = trace.get("verifiers", {}).get("version")
    return f"the server sent a trace of version {trace['version']}, of verifiers {package}; {PROTOCOL}"


def _weighted_rewards(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return the rewards of a trace. Raises InfrastructureError if one is missing."""
    if trace.get("is_timeout") or not trace.get("ok"):
        reason = trace.get("stop_condition") or "without a reason"
        raise InfrastructureError(f"the rollout did not complete: {reason}")
    rewards: dict[str, float] = {}
    for name, reward in (trace.get("rewards") or {}).items():
        if reward is None or not math.isfinite(reward["score"] * reward["weight"]):
            raise InfrastructureError(f"the reward {name} has no value")
        rewards[name] = reward["score"] * reward["weight"]
    if not rewards:
        raise InfrastructureError("the task has no reward")
    return rewards
