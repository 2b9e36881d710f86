"""Conversion of config scalars to the type of a key, checks of limits, and descriptions of both for messages."""

import math
import operator
import re
from types import NoneType
from typing import Any, get_args

from rlctl.config.fields import alternatives, literals
from rlctl.config.provenance import ConfigNode

TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
# Largest 64-bit integer, the limit of torch, numpy and vLLM.
_LARGEST_INTEGER = 2**63 - 1
_NUMBER_TEXT = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?")
_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_NOT_FINITE = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)


def describe_limits(limits: Any) -> str:
    """Return the limits of a number in words; empty if it has none."""
    return " and ".join(f"{words} {limits[name]}" for name, words in LIMITS.items() if name in limits)


def match_scalar(node: ConfigNode, hint: Any) -> str | int | float | bool | None:
    """Return the value converted to one of the hint's types; None if no type fits."""
    value = node.value
    allowed = alternatives(hint)
    if isinstance(value, str) and (value in literals(hint) or str in allowed):
        return value
    if isinstance(value, bool):
        return value if bool in allowed else None
    if isinstance(value, int) and int in allowed:
        return value
    if isinstance(value, int | float) and float in allowed:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and float in allowed and _NOT_FINITE.fullmatch(value):
        # `inf` and `nan` without YAML's dot count as numbers, so that `limit_mistake` names the allowed range.
        return float(value)
    # Text that YAML reads as another type, for example `name: 007` or an override pattern=[0-9].
    return node.text if str in allowed and value is not None else None


def number_remark(value: object, allowed: tuple[Any, ...]) -> str:
    """Return a remark if a text is a number in quotes or with commas, and a number is allowed; else an empty text."""
    if not isinstance(value, str) or not {int, float} & set(allowed):
        return ""
    if _WITH_COMMAS.fullmatch(value):
        return f"; a number has no commas; write {value.replace(',', '')}"
    return f"; without quotes: {value}" if _NUMBER_TEXT.fullmatch(value) else ""


def limit_mistake(node: ConfigNode, value: int | float, limits: Any) -> str:
    """Return a message with the limits and the number if it violates them; else an empty text."""
    # A whole number is always finite, even if no float can represent it.
    is_finite = isinstance(value, int) or math.isfinite(value)
    limits_text = describe_limits(limits)
    if not is_finite:
        separator = ", " if limits_text else ""
        return f"a finite number{separator}{limits_text}, not {describe_node(node)}"
    # Whole numbers are limited to 64 bits. Other numbers may be any finite number within the key's limits.
    lowest = -_LARGEST_INTEGER if isinstance(value, int) else -math.inf
    highest = limits.get("most", _LARGEST_INTEGER if isinstance(value, int) else math.inf)
    if value > highest:
        return f"at most {highest}, not {describe_node(node)}"
    if value < lowest:
        return f"at least {lowest}, not {describe_node(node)}"
    if all(_COMPARISONS[name](value, limits[name]) for name in LIMITS if name in limits):
        return ""
    return f"{limits_text}, not {describe_node(node)}"


def describe(hint: Any) -> str:
    """Return a description of a type for messages, for example "a whole number or null"."""
    words = literals(hint)
    names = [", ".join(words)] if words else []
    names += [TYPE_NAMES[alternative] for alternative in alternatives(hint) if not get_args(alternative)]
    prefix = "one of " if words and len(names) == 1 else ""
    return prefix + " or ".join(names)


def describe_node(node: ConfigNode) -> str:
    if isinstance(node.value, dict | list):
        return "a section" if isinstance(node.value, dict) else "a list"
    if node.value is None or isinstance(node.value, str):
        return "null" if node.value is None else repr(node.value)
    return node.text or str(node.value)
