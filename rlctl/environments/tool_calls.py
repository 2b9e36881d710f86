"""One assistant turn taken apart: its thinking, its tool calls in the model family's format, its other text.

Parsing reads a decoded copy and never changes sampled tokens. Text is decoded with special tokens kept, since some
formats mark calls in this way; the end tokens of a turn may be left on it. A call inside a thinking block is no call.
A turn that looks like a call and is none is a malformed call.
"""

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from rlctl.environments.tool_formats import (
    FORMS,
    PARSERS,
    Call,
    FoundCall,
    MalformedCall,
    Parameters,
    Parser,
    ToolCall,
    shown,
)
from rlctl.environments.tool_values import properties_of
from rlctl.utils.user_code import MAX_LEVELS, is_too_deep

# Calls of a turn, and characters of one call's arguments and name. A call beyond a bound is answered, and not made.
MAX_CALLS, MAX_ARGUMENTS, MAX_NAME = 256, 1 << 18, 200
_THINKING = re.compile(r"<think>|</think>|\[THINK\]|\[/THINK\]")
_OPENING = ("<think>", "[THINK]")
# Marks that no turn without a call has, in any format.
_CALL_MARK = re.compile(r"</?tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]")


@dataclass(frozen=True)
class ParsedMessage:
    """One assistant turn: its calls in order, and its text outside of calls and thinking."""

    content: str
    calls: list[Call]
    # Thinking, without its marks.
    reasoning: str = ""
    # All text after the thinking, calls included.
    said: str = ""


def parse_tool_calls(text: str, format: str, tools: list[dict[str, Any]]) -> ParsedMessage:
    """Return the calls in `text` and the text around them.

    format: a key of `PARSERS`. tools: schemas of the tools, as `tool_schema` makes them.
    """
    parameters = {tool["function"]["name"]: properties_of(tool) for tool in tools}
    said = _without_thinking(text, PARSERS[format], parameters)
    found = PARSERS[format](said, parameters)
    starts, ends = [each.start for each in found], [each.end for each in found]
    content = "".join(said[end:start] for end, start in zip([0, *ends], [*starts, len(said)], strict=True))
    calls = [each.call for each in found]
    if not calls and (reason := _near_call(said, parameters)):
        calls = [MalformedCall(f"{reason}; a call is {FORMS[format]}")]
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [MalformedCall(f"one of {len(calls):,} in a turn, and at most {MAX_CALLS} are called")]
    return ParsedMessage(content.strip(), [_bounded(each) for each in calls])


def split_turn(text: str, format: str | None, tools: list[dict[str, Any]]) -> ParsedMessage:
    """Return the calls of a turn, its text around them, and its thinking apart. format: None: no text is a call."""
    parameters = {tool["function"]["name"]: properties_of(tool) for tool in tools}
    said = _without_thinking(text, PARSERS[format] if format else _no_calls, parameters)
    at = text.rfind(said) if said else len(text)
    thought = _THINKING.sub("", text[:at]).strip() if said != text else ""
    said = said.lstrip("\n") if thought else said
    if format is None:
        return ParsedMessage(said, [], thought, said)
    parsed = parse_tool_calls(text, format, tools)
    content = parsed.content if parsed.calls else said
    return ParsedMessage(content, parsed.calls, thought, said)


def _no_calls(text: str, parameters: Parameters) -> list[FoundCall]:
    return []


def _without_thinking(text: str, find: Parser, parameters: Parameters) -> str:
    """Return the text after the thinking, up to any that has no end. A mark within a call's arguments is none."""
    begun = text.lstrip().startswith(_OPENING)
    marks = [mark for mark in _THINKING.finditer(text) if not begun or mark[0] not in _OPENING]
    if begun:
        if not marks:
            return ""
        text = text[marks[0].end() :]
    if not _THINKING.search(text):
        return text
    calls = [each for each in find(text, parameters) if isinstance(each.call, ToolCall)]
    starts = [each.start for each in calls]
    begin, end = 0, len(text)
    for mark in _THINKING.finditer(text):
        at = bisect_right(starts, mark.start()) - 1
        if at >= 0 and mark.end() <= calls[at].end:
            continue
        if mark[0] not in _OPENING:
            begin, end = mark.end(), len(text)
        elif end == len(text):
            end = mark.start()
    return text[begin:end]


def _near_call(text: str, parameters: Parameters) -> str:
    """Return why a text without calls looks as if it were one; empty if it does not."""
    if mark := _CALL_MARK.search(text):
        return f"the mark {mark[0].strip('<>[]|/=')} without a whole call"
    for name in re.findall(r'"name"\s*:\s*"([^"\n]{1,200})"', text):
        if name in parameters:
            return f"JSON that names {name}, and no whole call"
    return ""


def _bounded(call: Call) -> Call:
    """Return a call, or the reason why it is not made."""
    if isinstance(call, MalformedCall):
        return call
    if len(call.name) > MAX_NAME:
        return MalformedCall(f"a name of {len(call.name):,} characters, and at most {MAX_NAME} are allowed")
    if not _is_text(call.name):
        return MalformedCall("a name with half of a character (a lone surrogate)")
    arguments = f"arguments of {shown(call.name)}"
    if is_too_deep(call.arguments):
        return MalformedCall(f"{arguments} are nested too deep: at most {MAX_LEVELS} levels are allowed")
    try:
        length = len(json.dumps(call.arguments, allow_nan=False, ensure_ascii=False))
    except ValueError:  # Python's JSON takes NaN and infinity, and nobody else's
        return MalformedCall(f"{arguments} hold a number that is not finite")
    if length > MAX_ARGUMENTS:
        return MalformedCall(f"{arguments} have {length:,} characters, and at most {MAX_ARGUMENTS:,} are allowed")
    return call


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
