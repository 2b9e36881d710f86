"""Parsing of an assistant's turn into thinking, tool calls in the model family's format, and other text.

Parsing reads decoded text and never changes the sampled tokens. The text keeps special tokens, because some formats
mark calls with special tokens. The text may also keep the turn's end tokens. A call inside a thinking block is no call.
A turn that looks like a call but cannot be read as one is a malformed call.
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
    quote_line,
)
from rlctl.environments.tool_values import properties_of
from rlctl.utils.user_code import MAX_LEVELS, is_too_deep

# Most calls of a turn. All calls beyond this bound become one malformed call.
MAX_CALLS = 256
# Most characters of one call's arguments, and of its name. A larger call becomes a malformed call.
MAX_ARGUMENTS = 1 << 18
MAX_NAME = 200
_THINKING = re.compile(r"<think>|</think>|\[THINK\]|\[/THINK\]")
_OPENING = ("<think>", "[THINK]")
# Marks that only turns with a call have, in any format.
_CALL_MARK = re.compile(r"</?tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]")


@dataclass(frozen=True)
class ParsedMessage:
    """One assistant turn: its calls in order, and its text outside of calls and thinking."""

    content: str
    calls: list[Call]
    # Text of the thinking without marks such as <think>.
    reasoning: str = ""
    # All text after the thinking, calls included.
    visible_text: str = ""


def parse_tool_calls(text: str, format: str, tools: list[dict[str, Any]]) -> ParsedMessage:
    """Return the calls in `text` and the text around them.

    format: a key of `PARSERS`. tools: schemas of the tools, as `tool_schema` makes them.
    """
    parameters = {tool["function"]["name"]: properties_of(tool) for tool in tools}
    visible_text = _cut_thinking(text, find_calls=PARSERS[format], parameters=parameters)
    content = ""
    calls: list[Call] = []
    end = 0
    for found_call in PARSERS[format](visible_text, parameters):
        content += visible_text[end : found_call.start]
        calls.append(found_call.call)
        end = found_call.end
    content += visible_text[end:]
    if not calls and (reason := _describe_near_call(visible_text, parameters)):
        calls = [MalformedCall(f"{reason}; a call is {FORMS[format]}")]
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [MalformedCall(f"one of {len(calls):,} in a turn, and at most {MAX_CALLS} are called")]
    return ParsedMessage(content.strip(), [_check_bounds(call) for call in calls])


def split_turn(text: str, format: str | None, tools: list[dict[str, Any]]) -> ParsedMessage:
    """Return the calls of a turn, the text around them, and the thinking.

    format: a key of `PARSERS`; with None no text is a call. tools: schemas of the tools.
    """
    parameters = {tool["function"]["name"]: properties_of(tool) for tool in tools}
    find_calls = PARSERS[format] if format else _find_no_calls
    visible_text = _cut_thinking(text, find_calls=find_calls, parameters=parameters)
    reasoning = ""
    if visible_text != text:
        start = text.rfind(visible_text) if visible_text else len(text)
        reasoning = _THINKING.sub("", text[:start]).strip()
    if reasoning:
        # Templates write line breaks between the thinking and the text.
        visible_text = visible_text.lstrip("\n")
    content = visible_text
    calls: list[Call] = []
    if format is not None:
        parsed = parse_tool_calls(text, format, tools)
        calls = parsed.calls
        # `parsed.content` is stripped. A turn without a call keeps the blanks that were sampled.
        content = parsed.content if calls else visible_text
    return ParsedMessage(content=content, calls=calls, reasoning=reasoning, visible_text=visible_text)


def _find_no_calls(text: str, parameters: Parameters) -> list[FoundCall]:
    return []


def _cut_thinking(text: str, *, find_calls: Parser, parameters: Parameters) -> str:
    """Return the text after the last closed thinking block, up to a thinking block that is not closed.

    Thinking marks within a call's arguments are plain text.
    """
    # A call inside the first thinking block would hide its closing mark, so this block is cut before calls are found.
    if text.lstrip().startswith(_OPENING):
        closing_marks = [mark for mark in _THINKING.finditer(text) if mark[0] not in _OPENING]
        if not closing_marks:
            return ""
        text = text[closing_marks[0].end() :]
    if not _THINKING.search(text):
        return text
    calls = [found_call for found_call in find_calls(text, parameters) if isinstance(found_call.call, ToolCall)]
    call_starts = [found_call.start for found_call in calls]
    # Bounds of the text: behind the last closing mark, and before the first opening mark that follows.
    start = 0
    end = len(text)
    for mark in _THINKING.finditer(text):
        # Only the last call that begins before the mark can contain the mark; index -1: no call begins before.
        call_index = bisect_right(call_starts, mark.start()) - 1
        if call_index >= 0 and mark.end() <= calls[call_index].end:
            continue
        if mark[0] not in _OPENING:
            start = mark.end()
            end = len(text)
        elif end == len(text):
            end = mark.start()
    return text[start:end]


def _describe_near_call(text: str, parameters: Parameters) -> str:
    """Return why a text without a readable call looks like a call; empty if the text does not look like one."""
    if mark := _CALL_MARK.search(text):
        return f"the mark {mark[0].strip('<>[]|/=')} without a whole call"
    for name in re.findall(r'"name"\s*:\s*"([^"\n]{1,200})"', text):
        if name in parameters:
            return f"JSON that names {name}, and no whole call"
    return ""


def _check_bounds(call: Call) -> Call:
    """Return a call unchanged, or a MalformedCall with the reason if the call exceeds a bound."""
    if isinstance(call, MalformedCall):
        return call
    if len(call.name) > MAX_NAME:
        return MalformedCall(f"a name of {len(call.name):,} characters, and at most {MAX_NAME} are allowed")
    if not _is_text(call.name):
        return MalformedCall("a name with half of a character (a lone surrogate)")
    arguments = f"arguments of {quote_line(call.name)}"
    if is_too_deep(call.arguments):
        return MalformedCall(f"{arguments} are nested too deep: at most {MAX_LEVELS} levels are allowed")
    try:
        length = len(json.dumps(call.arguments, allow_nan=False, ensure_ascii=False))
    except ValueError:  # Python's JSON takes NaN and infinity, other JSON does not
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
