"""HTTP server for the agents of one environment process: `/sessions/ID/v1/...`, on its own thread.

Each agent has a session. The path names the session and the API key is its secret, so that every SDK, command line and
subprocess reaches only its own session. The server refuses wrong keys, wrong paths and bodies that are too large, and
prints each cause once.
"""

import asyncio
import hmac
import json
import logging
import os
import re
import resource
import socket
import sys
import threading
import traceback
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from types import ModuleType
from typing import Any, cast

from aiohttp import web

from rlctl.environments.agents import anthropic_messages, chat_completions, responses
from rlctl.environments.agents.agent_session import AgentSession, Flight
from rlctl.environments.agents.client_request import ClientRequest, RefusedError, whole_number
from rlctl.environments.agents.client_turn import ClientTurn
from rlctl.environments.agents.history import ToolSets
from rlctl.utils.ports import reached_at

# Most bytes of a request's body.
MAX_BODY = 64 << 20
# Seconds that an idle connection stays open: longer than the SDKs keep it, so that the client closes it.
_IDLE_S = 75.0
# Rounds of the event loop before a retry is judged. By then the lost connection of its first attempt is known.
_RETRY_ROUNDS = 4
# Some SDKs add `/v1` to a base address that has it already.
_PATH = re.compile(r"/sessions/(?P<id>[0-9a-f]{16})(?:/v1){0,2}(?P<rest>/.*)?")
# Path of an API -> module that reads its requests and writes its answers and errors.
APIS: dict[str, ModuleType] = {
    "/chat/completions": chat_completions,
    "/messages": anthropic_messages,
    "/responses": responses,
}
# Seconds that a streaming answer waits for the turn before it begins. An error in this time gets its own HTTP status.
_STREAM_S = 3.0
# Seconds between two comments that keep a stream open until the turn is sampled.
_COMMENT_S = 10.0


class Endpoint:
    """Server of one environment process. Only its event loop, `loop`, uses the sessions.

    bind: address to listen on.
    """

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._sessions: dict[str, AgentSession] = {}
        self._refusals = RefusalLog()
        self.tools = ToolSets()
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._started = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run_server, name="agents' endpoint", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def url(self, session: AgentSession) -> str:
        """Return the base URL of a session, as the `openai` SDK takes it."""
        host = reached_at(self._bind)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/sessions/{session.id}/v1"

    @property
    def listens(self) -> bool:
        """False if user code of this process closed the listener. Another file may have its descriptor since then."""
        try:
            if os.fstat(self._listener.fileno()).st_ino != self._inode:
                return False
            return bool(self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError:
            return False

    def open(self, session: AgentSession) -> None:
        """Accept requests for a session."""
        self._sessions[session.id] = session

    def close(self, session: AgentSession) -> None:
        """Refuse requests for a session from now on."""
        session.seal()
        self._sessions.pop(session.id, None)

    def _run_server(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._listen())
        except BaseException as error:  # the constructor raises it in its thread
            self._error = error
            return
        finally:
            self._started.set()
        self.loop.run_forever()

    async def _listen(self) -> None:
        _raise_file_limit()
        http = web.Server(self._answer_request)
        make_connection = partial(Connection, http, self._refusals.logger)
        server = await self.loop.create_server(make_connection, self._bind, 0, backlog=1024)
        self._listener = server.sockets[0]
        self._inode = os.fstat(self._listener.fileno()).st_ino
        self.port = self._listener.getsockname()[1]

    async def _answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        api: ModuleType = chat_completions
        try:
            session, path = self._find_session(request)
            api = APIS.get(path.removesuffix("/count_tokens"), chat_completions)
            if request.method == "HEAD" and path in ("", "/"):
                return web.Response()
            if request.method == "GET" and path == "/models":
                return web.json_response(_models())
            if request.method != "POST" or path not in (*APIS, "/reward", "/messages/count_tokens"):
                routes = ", ".join(("/models", *APIS))
                problem = f"{request.method} {path or '/'}: no such route; there are {routes}"
                raise RefusedError(problem, 404, "not_found")
            body = await self._read_body(request)
            if path == "/reward":
                session.take_reward(_read_reward(_read_object(body)))
                return web.json_response({"taken": True})
            read_request = partial(self._read_request, api, body)
            if path.endswith("/count_tokens"):
                client_request = await session.read(read_request, len(body))
                return web.json_response({"input_tokens": await session.count_tokens(client_request)})
            retries = whole_number(request.headers.get("x-stainless-retry-count", "")) or 0
            for _ in range(_RETRY_ROUNDS if retries else 0):
                await asyncio.sleep(0)
            digest = blake2b(path.encode() + b" " + body, digest_size=16).digest()
            flight = session.rejoin(digest, retries)
            if flight is None:
                flight = session.begin(digest, read_request, len(body))
            return await self._deliver_turn(request, session, api, flight)
        except RefusedError as error:
            return web.json_response(api.error_body(error), status=error.status)
        except ConnectionError:
            return web.Response()  # nobody reads this response
        except Exception as error:  # a defect of rlctl: this agent gets an error, and other agents go on
            self._print_refusal(request, f"a request that cannot be read: {traceback.format_exc()}")
            refused = RefusedError(f"the request cannot be read: {type(error).__name__}")
            return web.json_response(api.error_body(refused), status=refused.status)

    def _find_session(self, request: web.BaseRequest) -> tuple[AgentSession, str]:
        """Return the session of a request, and the rest of the path. Raises RefusedError."""
        path = _PATH.fullmatch(request.path)
        if path is None:
            self._print_refusal(request, "a path outside of any session")
            raise RefusedError("paths begin with /sessions/ID/v1", 404, "not_found")
        session = self._sessions.get(path["id"])
        if session is None:
            raise RefusedError("there is no such session: it has ended, or never was", 404, "session_ended")
        # A server that plays for an agent may send a key of its own in the first of these headers.
        sent_keys = [
            request.headers.get("Authorization", "").removeprefix("Bearer "),
            request.headers.get("x-api-key", ""),
        ]
        # Clients probe the address by a HEAD request without a key.
        if any(sent_keys) or request.method != "HEAD":
            if not any(hmac.compare_digest(key.encode(), session.secret.encode()) for key in sent_keys):
                self._print_refusal(request, "a session without its key")
                raise RefusedError("the key is not that of the session", 401, "authentication_error")
            session.was_reached = True
        return session, path["rest"] or ""

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        body = bytearray()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # aiohttp counts these bytes as a part of the answer, which has not begun yet.
            request.writer.output_size = 0
        try:
            if (request.content_length or 0) <= MAX_BODY:
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > MAX_BODY:
                        break
                else:  # the whole body was read
                    return bytes(body)
        except web.RequestPayloadError as error:
            raise RefusedError(f"the body cannot be read: {type(error).__name__}") from error
        problem = f"a body of more than {MAX_BODY:,} bytes"
        self._print_refusal(request, problem)
        raise RefusedError(f"the request has {problem}", 413, "request_too_large")

    @staticmethod
    def _read_request(api: ModuleType, body: bytes) -> ClientRequest:
        client_request: ClientRequest = api.read_request(_read_object(body))
        return replace(client_request, size=len(body))

    async def _deliver_turn(
        self, request: web.BaseRequest, session: AgentSession, api: ModuleType, flight: Flight
    ) -> web.StreamResponse:
        """Wait until a turn is sampled, and send it. Raises ConnectionResetError if the client has disconnected."""
        gone = _connection(request).gone
        waiting: list[asyncio.Future[Any]] = [flight.work, gone]
        flight.add_connection(gone)
        try:
            await asyncio.wait([flight.wants_stream, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if flight.wants_stream.done() and flight.wants_stream.result():
                return await self._stream_turn(request, session, api, flight)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not flight.work.done():  # then the connection is gone
                raise ConnectionResetError
            turn = flight.work.result()
            with session.refuse_on_defect():
                response = web.json_response(api.answer_body(turn))
            return await _send_turn(request, session, turn, response)
        finally:
            is_lost = gone.done() or request.transport is None or request.transport.is_closing()
            flight.remove_connection(gone, is_lost)

    async def _stream_turn(
        self, request: web.BaseRequest, session: AgentSession, api: ModuleType, flight: Flight
    ) -> web.StreamResponse:
        gone = _connection(request).gone
        waiting: list[asyncio.Future[Any]] = [flight.work, gone]
        await asyncio.wait(waiting, timeout=_STREAM_S, return_when=asyncio.FIRST_COMPLETED)
        # Before the stream has begun, an error is answered with its own HTTP status.
        if flight.work.done() and (error := flight.work.exception()) is not None:
            raise error
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            while not flight.work.done():
                await response.write(api.waiting_event())
                await asyncio.wait(waiting, timeout=_COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ConnectionResetError
            turn = flight.work.result()
            with session.refuse_on_defect():
                events = b"".join(api.answer_events(turn))
        except RefusedError as refused:
            await response.write(api.error_event(refused))
            await response.write_eof()
            return response
        return await _send_turn(request, session, turn, response, events)

    def _print_refusal(self, request: web.BaseRequest, cause: str) -> None:
        self._refusals.print_once(_connection(request).peer, cause)


class Connection(web.RequestHandler):
    """One client's connection. `gone` is done once the connection is lost."""

    def __init__(self, http: web.Server, logger: logging.Logger) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(http, loop=loop, logger=logger, access_log=logger, keepalive_timeout=_IDLE_S)
        self.peer = ""
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = str((transport.get_extra_info("peername") or ("?",))[0])

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)


class RefusalLog(logging.Handler):
    """Log of refused requests and of the HTTP library's errors on standard error. Each cause is printed once."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._printed: set[str] = set()
        # The HTTP library logs its errors here. Its own logger would print a traceback for each error.
        self.logger = logging.Logger("rlctl.agents", logging.ERROR)
        self.logger.addHandler(self)

    def print_once(self, peer: str, cause: str) -> None:
        """Print a refused request, unless this cause was printed before."""
        if cause not in self._printed:
            self._printed.add(cause)
            print(f"agents' endpoint: {peer} asked for {cause}, and was refused", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.print_once("a client", f"{record.msg} ({type(error).__name__})")


async def _send_turn(
    request: web.BaseRequest, session: AgentSession, turn: ClientTurn, response: web.StreamResponse, events: bytes = b""
) -> web.StreamResponse:
    """Send a turn, and make it a part of the rollout. Raises ConnectionResetError if the client has disconnected.

    events: events of the turn for a streaming answer; empty if `response` has the whole body.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError
    # Before the last byte is sent, because the agent may end as soon as it has that byte.
    session.deliver(turn)
    if events:
        await response.write(events)
    else:
        await response.prepare(request)
    await response.write_eof()
    return response


def _connection(request: web.BaseRequest) -> Connection:
    return cast(Connection, request.protocol)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {type(error).__name__}") from None
    if not isinstance(parsed, dict):
        raise RefusedError("the body must be a JSON object")
    return parsed


def _read_reward(body: dict[str, Any]) -> Any:
    """Return the reward in a body: the value of `reward` if it is the only key, else all values by name."""
    return body["reward"] if set(body) == {"reward"} else body


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rlctl"}]}


def _raise_file_limit() -> None:
    """Raise this process's limit of open files to the hard limit, because each agent has several connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
