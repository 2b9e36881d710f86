"""What a process of rewards replies: which rewards cannot be loaded, then the outcome of one item after the other.

A reply carries the ids of its call and its item: whatever else comes along is no reply.
"""

import json
import math
import reprlib
from dataclasses import asdict
from typing import Any

from rlctl.rewards.base import MAX_DETAIL, MAX_TRACE, Outcome, RewardFailure
from rlctl.workers.channel import BadReply

# JSON escapes a character by six at most, one beyond the basic plane by twelve.
MAX_REPLY = 12 * (MAX_TRACE + 2 * MAX_DETAIL) + 65536


def problems(reply: dict[str, Any]) -> list[tuple[int | None, str]]:
    """Return (index of a reward, why) for each that cannot be loaded. Raises BadReply."""
    try:
        return [(int(index), _text(reason)) for index, reason in reply["problems"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadReply("a reply that lists no problems") from error


def outcome(reply: dict[str, Any], call: int, item: int) -> Outcome:
    """Return the outcome of item `item` of call `call`. Raises BadReply for another's."""
    if (reply.get("call"), reply.get("item")) != (call, item):
        told = (reprlib.repr(reply.get(key)) for key in ("call", "item"))
        raise BadReply(_text("a reply to call {}, item {}".format(*told)))
    if isinstance(failure := reply.get("failure"), dict):
        return RewardFailure(*(_text(failure.get(key, "")) for key in ("kind", "where", "detail", "trace")))
    value = reply.get("value")
    if not isinstance(value, float) or not math.isfinite(value):
        raise BadReply("a reply without a finite value")
    return value


def _text(told: object) -> str:
    """Return a text of the child's that every file and terminal takes. Raises BadReply for what is no text."""
    if not isinstance(told, str):
        raise BadReply("a reply whose text is none")
    return told.encode("utf-8", "replace").decode()


def answer(call: int, item: int, outcome: Outcome) -> bytes:
    """The line that tells the outcome of one item."""
    told = {"failure": asdict(outcome)} if isinstance(outcome, RewardFailure) else {"value": outcome}
    return json.dumps({"call": call, "item": item, **told}).encode() + b"\n"
