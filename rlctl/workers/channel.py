"""How a guarded process and its parent talk: requests are pickled, replies are lines of JSON of bounded length.

A request is read by rlctl's own code in the child. A reply comes from a process in which the user's code runs, so it
is never unpickled; whoever asked checks that it answers what was asked.
"""

import json
import pickle
import select
import socket
import time
from typing import Any


class BadReply(Exception):
    """Bytes that are no reply to what was asked."""


class Channel:
    """The parent's end. Every wait has a deadline: TimeoutError. A child that hung up: EOFError, ConnectionError.

    max_reply: bytes of a reply.
    """

    def __init__(self, connection: socket.socket, max_reply: int) -> None:
        self._connection, self._max_reply, self._buffer = connection, max_reply, b""

    def send(self, message: Any, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(pickle.dumps(message))

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next reply. Raises BadReply for a line that is none."""
        try:
            message = json.loads(self._line(time.monotonic() + timeout_s))
        except (ValueError, RecursionError) as error:  # the latter where it is nested too deep
            raise BadReply(str(error)) from error
        if not isinstance(message, dict):
            raise BadReply("a reply is a JSON object")
        return message

    def is_quiet(self) -> bool:
        """Return whether nothing came that was not asked for, the end included."""
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        poll.register(self._connection, select.POLLIN)
        return not self._buffer and not poll.poll(0)

    def close(self) -> None:
        self._connection.close()

    def _line(self, end: float) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._max_reply:
                raise BadReply(f"more than {self._max_reply} bytes without an end")
            self._connection.settimeout(max(1e-3, end - time.monotonic()))
            part = self._connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
            if b"\n" not in self._buffer and time.monotonic() > end:
                raise TimeoutError
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
