"""How a worker process and its parent talk: requests are pickled, replies are lines of JSON of bounded length.

A request is read by rlctl's own code in the child. A reply comes from a process in which the user's code runs, so it
is never unpickled, and it carries the ids of its call and its item: whatever else comes along is no reply.
"""

import json
import math
import pickle
import reprlib
import select
import socket
import time
from dataclasses import asdict
from typing import Any

from rlctl.rewards.base import MAX_DETAIL, MAX_TRACE, Outcome, RewardFailure, shortened

# JSON escapes a character by six at most, one beyond the basic plane by twelve.
MAX_REPLY = 12 * (MAX_TRACE + 2 * MAX_DETAIL) + 65536


class BadReply(Exception):
    """Bytes that are no reply to what was asked."""


class Channel:
    """The parent's end. Every wait has a deadline: TimeoutError. A child that hung up: EOFError, ConnectionError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, b""

    def send(self, message: Any, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(pickle.dumps(message))

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next reply. Raises BadReply for a line that is none."""
        try:
            message = json.loads(self._line(time.monotonic() + timeout_s))
        except (ValueError, RecursionError) as error:  # the latter where it is nested too deep
            raise BadReply(shortened(str(error))) from error
        if not isinstance(message, dict):
            raise BadReply("a reply is a JSON object")
        return message

    def problems(self, timeout_s: float) -> list[tuple[int | None, str]]:
        """Return (index of a reward, why) for each that cannot be loaded."""
        message = self.reply(timeout_s)
        try:
            return [(int(index), _text(reason)) for index, reason in message["problems"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadReply("a reply that lists no problems") from error

    def outcome(self, call: int, item: int, timeout_s: float) -> Outcome:
        """The outcome of item `item` of call `call`. Raises BadReply for another's."""
        message = self.reply(timeout_s)
        if (message.get("call"), message.get("item")) != (call, item):
            told = (reprlib.repr(message.get(key)) for key in ("call", "item"))
            raise BadReply(_text("a reply to call {}, item {}".format(*told)))
        if isinstance(failure := message.get("failure"), dict):
            return RewardFailure(*(_text(failure.get(key, "")) for key in ("kind", "where", "detail", "trace")))
        value = message.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise BadReply("a reply without a finite value")
        return value

    def is_quiet(self) -> bool:
        """Return whether nothing came that was not asked for, the end included."""
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        poll.register(self._connection, select.POLLIN)
        return not self._buffer and not poll.poll(0)

    def close(self) -> None:
        self._connection.close()

    def _line(self, end: float) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_REPLY:
                raise BadReply(f"more than {MAX_REPLY} bytes without an end")
            self._connection.settimeout(max(1e-3, end - time.monotonic()))
            part = self._connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
            if b"\n" not in self._buffer and time.monotonic() > end:
                raise TimeoutError
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _text(told: object) -> str:
    """Return a text of the child's that every file and terminal takes. Raises BadReply for what is no text."""
    if not isinstance(told, str):
        raise BadReply("a reply whose text is none")
    return told.encode("utf-8", "replace").decode()


def answer(call: int, item: int, outcome: Outcome) -> bytes:
    """The line that tells the outcome of one item."""
    told = {"failure": asdict(outcome)} if isinstance(outcome, RewardFailure) else {"value": outcome}
    return json.dumps({"call": call, "item": item, **told}).encode() + b"\n"
