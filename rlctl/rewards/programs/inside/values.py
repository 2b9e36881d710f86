"""Plain values as JSON, for two processes that do not trust each other. Neither unpickles anything.

Numbers, texts, bytes and containers travel by value. Any other object stays where it is:
the other side gets its number. Runs in the sandbox, with the standard library alone.
"""

from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Deepest nesting of a value. A deeper one is refused by both sides.
MAX_DEPTH = 100
# Largest integer that JSON carries in decimal digits. A larger one travels in hexadecimal.
_LARGEST_DECIMAL = 10**300


class NotPlainError(Exception):
    """A value that cannot travel."""


def encode_value(payload: Any, keep: Callable[[Any], list[Any]], depth: int = 0) -> Any:
    """Return `payload` as JSON. keep: returns the JSON of an object that stays, or raises NotPlainError."""
    if depth > MAX_DEPTH:
        raise NotPlainError(f"a value is nested deeper than {MAX_DEPTH} levels")
    if payload is None or payload is True or payload is False:
        return payload
    if isinstance(payload, str):
        return str.__str__(payload)
    if isinstance(payload, int):
        number = int.__int__(payload)
        return number if abs(number) < _LARGEST_DECIMAL else ["int", hex(number)]
    if isinstance(payload, float):
        return float.__float__(payload)
    for kind, class_ in _SEQUENCES.items():
        if isinstance(payload, class_):
            return [kind, [encode_value(member, keep, depth + 1) for member in class_.__iter__(payload)]]
    if isinstance(payload, dict):
        pairs = []
        for key, member in dict.items(payload):
            pairs.append([encode_value(key, keep, depth + 1), encode_value(member, keep, depth + 1)])
        return ["dict", pairs]
    if isinstance(payload, bytes | bytearray):
        return ["bytes", bytes(payload).hex()]
    if isinstance(payload, complex):
        return ["complex", [payload.real, payload.imag]]
    text = _encode_standard_type(payload)
    return keep(payload) if text is None else text


def decode_value(coded: Any, take: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value of `encode_value`. take: returns the stand-in of an object that did not travel.

    Raises NotPlainError for anything that `encode_value` does not write.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"a value is nested deeper than {MAX_DEPTH} levels")
    if coded is None or isinstance(coded, bool | int | float | str):
        return coded
    if not isinstance(coded, list) or len(coded) < 2 or not isinstance(coded[0], str):
        raise NotPlainError("an answer that is no value")
    kind = coded[0]
    content = coded[1]
    try:
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([decode_value(member, take, depth + 1) for member in content])
        if kind == "dict":
            pairs = [
                (decode_value(key, take, depth + 1), decode_value(member, take, depth + 1)) for key, member in content
            ]
            return dict(pairs)
        if kind in _FROM_TEXT:
            return _FROM_TEXT[kind](content)
        if kind == "complex":
            return complex(*content)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise NotPlainError(f"an answer that is no {kind}") from error
    return take(coded)


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": lambda seconds: timedelta(seconds=seconds),
}


def _encode_standard_type(payload: Any) -> list[Any] | None:
    """Return the JSON of a number or a date of the standard library. A subclass is no such value."""
    class_ = type(payload)
    if class_ in (Decimal, Fraction):
        return [class_.__name__, str(payload)]
    if class_ in (datetime, date):
        return [class_.__name__, payload.isoformat()]
    if class_ is timedelta:
        return ["timedelta", payload.total_seconds()]
    return None
