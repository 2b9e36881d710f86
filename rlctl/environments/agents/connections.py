"""Connections of the agents' endpoint, bounded in number, and in the time until they bring a session's key.

A stranger can open connections, and send headers byte by byte. His connections end soon, and make room for others.
"""

import asyncio
import logging
import resource
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web

# Connections at one time: several for each of hundreds of agents. A process has as many descriptors for its clients.
MAX_CONNECTIONS = 4096
_SHARE = 3
# Seconds until a connection brings the key of a session, and a moment for an event loop that was busy until then.
HEADERS_S, _MOMENT_S = 10.0, 1.0
# Seconds that an idle connection of a session is kept: longer than the SDKs keep theirs.
IDLE_S = 75.0
# Seconds in which the rest of a refused body is read: the client sees the refusal.
_LINGER_S = 0.5
# Reasons of refusals that are told. The others are counted, and the count is told at each power of ten.
_TOLD = 20


class Connection(web.RequestHandler):
    """One connection. gone: done once it is lost."""

    def __init__(self, all_: "Connections", server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        logger = all_.logger
        super().__init__(
            server, loop=loop, logger=logger, access_log=logger, keepalive_timeout=IDLE_S, lingering_time=_LINGER_S
        )
        self._all = all_
        self.peer = ""
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = str((transport.get_extra_info("peername") or ("?",))[0])
        self._all.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._all.drop(self)
        if not self.gone.done():
            self.gone.set_result(None)

    def abort(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Connections(logging.Handler):
    """All connections of an endpoint, on its event loop. It tells each reason of a refusal once.

    most: connections at one time.
    """

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        super().__init__(logging.ERROR)
        self._most = min(most, max(1, _descriptors() // _SHARE))
        self._number = 0
        # Connections without a session's key so far, oldest first, and their deadlines.
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._told: set[str] = set()
        self._untold = 0
        # Errors of the HTTP library: each has a traceback otherwise.
        self.logger = logging.Logger("rlctl.agents", logging.ERROR)
        self.logger.addHandler(self)

    async def listen(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], bind: str
    ) -> asyncio.Server:
        """Listen on a free port. Raises OSError for an address that is not this machine's."""
        server = web.Server(handler)
        return await asyncio.get_running_loop().create_server(lambda: Connection(self, server), bind, 0, backlog=1024)

    def add(self, one: Connection) -> None:
        """Hold a connection. Where there are too many, the oldest stranger goes."""
        loop = asyncio.get_running_loop()
        self._number += 1
        self._strangers[one] = loop.call_later(HEADERS_S, self._late, one)
        if self._number > self._most:
            oldest = next(iter(self._strangers))
            self.tell(oldest.peer, f"more than {self._most:,} connections")
            self._forget(oldest)
            oldest.abort()

    def drop(self, one: Connection) -> None:
        """Learn that a connection has ended."""
        self._number -= 1
        self._forget(one)

    def prove(self, one: Connection) -> None:
        """Learn that a connection brought the key of a session."""
        if one in self._strangers:
            self._forget(one)

    def tell(self, peer: str, what: str) -> None:
        """Print the request of a stranger, once each cause. Beyond `_TOLD` causes, print the number of refusals."""
        if what in self._told:
            return
        if len(self._told) < _TOLD:
            self._told.add(what)
            said = f"{peer} asked for {what}, and was refused"
        else:
            self._untold += 1
            if not _is_power_of_ten(self._untold):
                return
            said = f"refused {self._untold:,} more for other causes than the {_TOLD} above, the last {peer} for {what}"
        print(f"agents' endpoint: {said}", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.tell("a client", f"{record.msg} ({type(error).__name__})")

    def _late(self, one: Connection) -> None:
        # Requests that came while the loop was busy are read first.
        self._strangers[one] = asyncio.get_running_loop().call_later(_MOMENT_S, self._too_late, one)

    def _too_late(self, one: Connection) -> None:
        self.tell(one.peer, f"a connection without a session's key for {HEADERS_S:g} s")
        self._forget(one)
        one.abort()

    def _forget(self, one: Connection) -> None:
        timer = self._strangers.pop(one, None)
        if timer is not None:
            timer.cancel()


def _is_power_of_ten(number: int) -> bool:
    return str(number).rstrip("0") == "1"


def _descriptors() -> int:
    """Let this process open as many files as it may, and return the number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most if most != resource.RLIM_INFINITY else 1 << 20
