"""HTTP server of a process's agents: `/sessions/ID/v1/...`, on its own thread.

A session is named in the path and guarded by its secret, so that every SDK, command line and subprocess reaches its own
alone. The server answers wrong keys and paths at once, and bounds bodies and their time.
"""

import asyncio
import hmac
import json
import re
import socket
import sys
import threading
from functools import partial
from hashlib import blake2b
from types import ModuleType
from typing import Any

from aiohttp import web

from rlctl.environments.agents import anthropic_messages, chat_completions, responses
from rlctl.environments.agents.asked import AskedTurn, RefusedError
from rlctl.environments.agents.said import SaidTurn
from rlctl.environments.agents.session import AgentSession, Flight

# Bytes of a request, and seconds that its body may take.
MAX_BODY, BODY_S = 64 << 20, 60.0
# Some SDKs add `/v1` to a base address that has it already.
_PATH = re.compile(r"/sessions/(?P<id>[0-9a-f]{16})(?:/v1){0,2}(?P<rest>/.*)?")
# An API: how a request is read, an answer and an error are written. Each is a module.
APIS: dict[str, ModuleType] = {
    "/chat/completions": chat_completions,
    "/messages": anthropic_messages,
    "/responses": responses,
}
# A stream begins after this many seconds without a turn: errors before that have their own status.
_STREAM_S, _COMMENT_S = 3.0, 10.0
_TOLD = 20


class Endpoint:
    """Server of one process. Sessions belong to its event loop, `loop`.

    bind: address to listen on.
    """

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._sessions: dict[str, AgentSession] = {}
        # Causes of refused strangers that were told.
        self._told: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._started = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="agents' endpoint", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def url(self, session: AgentSession) -> str:
        """Return the base address of a session, as the `openai` SDK takes it."""
        host = _own_address() if self._bind in ("0.0.0.0", "::") else self._bind
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/sessions/{session.id}/v1"

    def open(self, session: AgentSession) -> None:
        """Serve a session."""
        self._sessions[session.id] = session

    def close(self, session: AgentSession) -> None:
        """Serve a session no more."""
        session.seal()
        self._sessions.pop(session.id, None)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._listen())
        except BaseException as error:  # the thread that made it raises this
            self._error = error
            return
        finally:
            self._started.set()
        self.loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self._bind, 0, backlog=1024)
        await site.start()
        self.port = runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        api: ModuleType = chat_completions
        try:
            session, path = self._find(request)
            api = APIS.get(path.removesuffix("/count_tokens"), chat_completions)
            if request.method == "HEAD" and path in ("", "/"):
                return web.Response()
            if request.method == "GET" and path == "/models":
                return web.json_response(_models())
            if request.method != "POST" or path not in (*APIS, "/reward", "/messages/count_tokens"):
                raise RefusedError(f"{request.method} {path or '/'}: this endpoint has no such route", 404, "not_found")
            body = await self._body(request)
            if path == "/reward":
                session.value(_reward(_json(body)))
                return web.json_response({"taken": True})
            read = partial(self._read, api, body)
            if path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": session.count_tokens(read())})
            retries = request.headers.get("x-stainless-retry-count", "0")
            digest = blake2b(path.encode() + b" " + body, digest_size=16).digest()
            flight = session.join(digest, int(retries) if retries.isdecimal() else 0, read)
            return await self._deliver(request, session, api, flight, _wants_stream(body))
        except RefusedError as error:
            return web.json_response(api.error(error), status=error.status)

    def _find(self, request: web.Request) -> tuple[AgentSession, str]:
        """Return the session of a request, and the path below it. Raises RefusedError."""
        found = _PATH.fullmatch(request.path)
        session = self._sessions.get(found["id"]) if found else None
        if found is None:
            self._tell(request, "a path outside of any session")
            raise RefusedError("paths begin with /sessions/ID/v1", 404, "not_found")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if session is None:
            raise RefusedError("there is no such session: it has ended, or never was", 404, "session_ended")
        head = request.method == "HEAD" and not given
        if not head and not hmac.compare_digest(given.encode(), session.secret.encode()):
            self._tell(request, "a session without its key")
            raise RefusedError("the key is not that of the session", 401, "authentication_error")
        return session, found["rest"] or ""

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            self._tell(request, f"a body of more than {MAX_BODY:,} bytes")
            raise RefusedError(f"the body has more than {MAX_BODY:,} bytes", 413, "request_too_large") from None
        except TimeoutError:
            self._tell(request, f"a body that took longer than {BODY_S:g} s")
            raise RefusedError(f"the body took longer than {BODY_S:g} s", 408, "timeout") from None

    @staticmethod
    def _read(api: ModuleType, body: bytes) -> AskedTurn:
        asked: AskedTurn = api.read(_json(body))
        return asked

    async def _deliver(
        self, request: web.Request, session: AgentSession, api: ModuleType, flight: Flight, streamed: bool
    ) -> web.StreamResponse:
        """Answer with a turn once it is there."""
        flight.waiting += 1
        try:
            if streamed:
                return await self._stream(request, session, api, flight)
            said = await asyncio.shield(flight.work)
            with session.guarded():
                answer = web.json_response(api.write(said))
            return await _sent(request, session, flight, said, answer)
        finally:
            flight.waiting -= 1
            flight.lost |= request.transport is None or request.transport.is_closing()

    async def _stream(
        self, request: web.Request, session: AgentSession, api: ModuleType, flight: Flight
    ) -> web.StreamResponse:
        await asyncio.wait([flight.work], timeout=_STREAM_S)
        if flight.work.done() and (error := flight.work.exception()) is not None:
            raise error
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            while not flight.work.done():
                await response.write(api.waiting())
                await asyncio.wait([flight.work], timeout=_COMMENT_S)
            said = await asyncio.shield(flight.work)
            with session.guarded():
                events = b"".join(api.stream(said))
        except RefusedError as refused:
            await response.write(api.stream_error(refused))
            await response.write_eof()
            return response
        return await _sent(request, session, flight, said, response, events)

    def _tell(self, request: web.Request, what: str) -> None:
        """Print the request of a stranger, once each cause."""
        if what not in self._told and len(self._told) < _TOLD:
            self._told.add(what)
            print(f"agents' endpoint: {request.remote} asked for {what}, and was refused", file=sys.stderr, flush=True)


async def _sent(
    request: web.Request,
    session: AgentSession,
    flight: Flight,
    said: SaidTurn,
    response: web.StreamResponse,
    rest: bytes = b"",
) -> web.StreamResponse:
    """Send a turn. It is a part of the rollout from now on, if its client is still there."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return response
    # Before the last byte: the agent may end as soon as it has it.
    session.deliver(said)
    if rest:
        await response.write(rest)
    else:
        await response.prepare(request)
    await response.write_eof()
    return response


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise RefusedError("the body must be a JSON object")
    return found


def _reward(body: dict[str, Any]) -> Any:
    return body["reward"] if set(body) == {"reward"} else body


def _wants_stream(body: bytes) -> bool:
    return bool(re.search(rb'"stream"\s*:\s*true', body)) and bool(_json(body).get("stream"))


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rlctl"}]}


def _own_address() -> str:
    """Return the address by which other machines reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(("10.255.255.255", 1))  # nothing is sent
        return str(found.getsockname()[0])
