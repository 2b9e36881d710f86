"""Parsers of tool calls in a turn's text, one for each model family's format.

Each parser accepts the same text as vLLM's parser of that format.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlctl.environments.tool_values import Properties, convert_arguments
from rlctl.utils.user_code import MAX_LEVELS

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    # Parameter -> JSON value.
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Text that was meant as a call. The model reads why it is no call."""

    error: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class FoundCall:
    """A call and its position in the turn's text."""

    call: Call
    # Index of the call's first character, and of the character behind its last one.
    start: int
    end: int


# Schemas of each tool's parameters, by the tool's name. A format without types converts its values by these schemas.
Parameters = dict[str, Properties]
# Returns the calls in a text, in order.
Parser = Callable[[str, Parameters], list[FoundCall]]


def tool_format(template: str) -> str | None:
    """Return the format in which a model with this chat template calls tools, a key of `PARSERS`; None if unknown."""
    if "<arg_key>" in template:
        return None
    for name, marker in (
        ("qwen3_coder", "<function="),
        ("hermes", "<tool_call>"),
        ("llama3", '"parameters": dictionary of argument'),
        ("llama3", "<|python_tag|>"),
        ("mistral", "[TOOL_CALLS]"),
    ):
        if marker in template:
            return name
    return None


_CALL_MARK = re.compile(r"</?tool_call>")


def _find_hermes(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes).

    The last call of a turn may lack its closing mark, as in serving engines.
    """
    calls: list[FoundCall] = []
    position = 0
    while (start := text.find("<tool_call>", position)) >= 0:
        call, end = _read_json_call(text, start + len("<tool_call>"), "arguments")
        # Text up to the next mark belongs to this call.
        mark = _CALL_MARK.search(text, end)
        if mark is None:
            position = len(text)
        else:
            position = mark.end() if mark[0] == "</tool_call>" else mark.start()
            between = text[end : mark.start()].strip()
            if isinstance(call, ToolCall) and between:
                call = MalformedCall(f"not one JSON object: {quote_line(between)} follows it before the call's end")
        if mark is not None or isinstance(call, MalformedCall):  # else text behind the JSON is content
            end = position
        calls.append(FoundCall(call, start, end))
    return calls


_PYTHON_TAG = "<|python_tag|>"


def _find_llama3(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `{"name": ..., "parameters": {...}}`, anywhere in the text, also after `<|python_tag|>`.

    JSON that is no call is text. The search ends at the first brace that begins no valid JSON.
    """
    calls: list[FoundCall] = []
    position = 0
    while (start := text.find("{", position)) >= 0:
        before = text[position:start]
        has_tag = before.rstrip().endswith(_PYTHON_TAG)
        # No other text stands before the brace.
        is_bare = not before.strip(" \t\r\n;")
        value, end = _decode_json(text, start)
        if isinstance(value, MalformedCall):
            if has_tag or (is_bare and '"name"' in text[start:]):
                calls.append(FoundCall(value, start, len(text)))
            break
        names_tool = is_bare and str(value.get("name")) in parameters
        is_call = "name" in value and ("parameters" in value or "arguments" in value or names_tool)
        if has_tag or is_call:
            call_start = text.rindex(_PYTHON_TAG, position, start) if has_tag else start
            calls.append(FoundCall(_read_call(value, "parameters"), call_start, end))
        position = end
    if not calls and (tag := text.find(_PYTHON_TAG)) >= 0:
        rest = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)\s*$", "", text[tag + len(_PYTHON_TAG) :])
        calls.append(FoundCall(MalformedCall(f"not a JSON object: {quote_line(rest)}"), tag, len(text)))
    return calls


# Possessive quantifiers (`*+`): with backtracking, a turn of n blanks would take a time of n cubed.
_MISTRAL_MARK = re.compile(r"\[TOOL_CALLS\](?:\s*+\[TOOL_CALLS\])*+\s*+")
_MISTRAL_HEAD = re.compile(r"([^\[\]{}]*+)(?:\[CALL_ID\][^\[\]{}]*+)?(?:\[ARGS\]\s*+)?(?=\{)")


def _find_mistral(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.

    The id and the mark before the arguments may be left out. Arguments behind a name are converted by the tool's
    schema. Other words may stand before a list. Marks behind a list are plain text.
    """
    calls: list[FoundCall] = []
    mark = _MISTRAL_MARK.search(text)
    while mark:
        next_mark = _MISTRAL_MARK.search(text, mark.end())
        head = _MISTRAL_HEAD.match(text, mark.end())
        name = head[1].strip() if head else ""
        value, end = _decode_json(text, head.end() if head and name else mark.end())
        if isinstance(value, MalformedCall) and not name:
            segment_end = next_mark.start() if next_mark else len(text)
            value, end = _find_list(text, mark.end(), segment_end) or (value, segment_end)
        if isinstance(value, MalformedCall):
            calls.append(FoundCall(value, mark.start(), next_mark.start() if next_mark else len(text)))
            mark = next_mark
            continue
        if name and isinstance(value, dict):
            value = {"name": name, "arguments": convert_arguments(value, parameters.get(name, {}))}
        start = mark.start()
        for call in value if isinstance(value, list) else [value]:
            calls.append(FoundCall(_read_call(call, "arguments"), start, end))
            start = end  # the first call has the list's whole text, and the others have none
        is_list = isinstance(value, list) or (not name and "name" in value)  # one object is a list of one
        # The search goes on behind the value, because marks within the value are plain text.
        mark = None if is_list else _MISTRAL_MARK.search(text, end)
    return calls


def _find_list(text: str, start: int, end: int) -> tuple[Any, int] | None:
    """Return the JSON list of objects between two positions, and the position after it; None if there is none."""
    list_start = text.find("[{", start, end)
    list_end = text.rfind("}]", start, end) + len("}]")
    if list_start < 0 or list_end <= list_start:
        return None
    try:
        return json.loads(text[list_start:list_end]), list_end
    except (ValueError, RecursionError):
        return None


_CODER_MARK = re.compile(r"<tool_call>\s*(?:<function=)?|<function=")
_CODER_END = re.compile(r"</tool_call>|<tool_call>|<function=")
_CODER_NAME = re.compile(r"([^<>\n]+)>")
_CODER_KEY = re.compile(r"<parameter=([^>\n]+)>")
_CODER_OUTER_END = re.compile(r"\s*</tool_call>")
_VALUE_END = re.compile(r"</parameter>|(?=<parameter=)")


def _find_qwen3_coder(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5).

    The marks `<tool_call>` and `</tool_call>` may be left out. `</function>` and `</parameter>` may be left out before
    the next function or parameter. Values have no type in the text, so the parameter's schema converts them.
    """
    calls: list[FoundCall] = []
    position = 0
    while mark := _CODER_MARK.search(text, position):
        call, end = _read_coder_call(text, mark.end(), parameters, has_function_mark=mark[0].endswith("="))
        if isinstance(call, MalformedCall):
            end_mark = _CODER_END.search(text, end)
            end = len(text) if end_mark is None else end_mark.start()
        if outer_end := _CODER_OUTER_END.match(text, end):
            end = outer_end.end()
        calls.append(FoundCall(call, mark.start(), end))
        position = end
    return calls


def _read_coder_call(text: str, position: int, parameters: Parameters, *, has_function_mark: bool) -> tuple[Call, int]:
    """Return the call whose name begins at a position, and the position after the call.

    has_function_mark: `<function=` is before the position.
    """
    name_match = _CODER_NAME.match(text, position) if has_function_mark else None
    if name_match is None:
        return MalformedCall("not <function=NAME><parameter=KEY>value</parameter></function>"), position
    name = name_match[1].strip()
    arguments: dict[str, Any] = {}
    position = name_match.end()
    while True:
        while text[position : position + 1].isspace():
            position += 1
        if text.startswith("</function>", position):
            position += len("</function>")
            break
        if _CODER_END.match(text, position):
            break
        key = _CODER_KEY.match(text, position)
        value_end = _VALUE_END.search(text, key.end()) if key else None
        if key is None or value_end is None:
            rest = text[position : position + 200]
            problem = f"{quote_line(rest)} is no <parameter=KEY>value</parameter>" if rest else "without </function>"
            return MalformedCall(problem), position
        arguments[key[1].strip()] = text[key.end() : value_end.start()].removeprefix("\n").removesuffix("\n")
        position = value_end.end()
    return ToolCall(name, convert_arguments(arguments, parameters.get(name, {}))), position


# Description of each format, which the model reads after a malformed call. Marks that are special tokens are named in
# words, because written out they would be encoded as plain text and not as the special token.
FORMS = {
    "hermes": "JSON with name and arguments, between the opening and the closing mark tool_call",
    "llama3": "JSON with name and parameters",
    "mistral": "the mark TOOL_CALLS and a list of JSON with name and arguments",
    "qwen3_coder": "<function=NAME><parameter=KEY>value</parameter></function>, within the marks tool_call",
}
PARSERS: dict[str, Parser] = {
    "hermes": _find_hermes,
    "llama3": _find_llama3,
    "mistral": _find_mistral,
    "qwen3_coder": _find_qwen3_coder,
}


def _read_json_call(text: str, position: int, key: str) -> tuple[Call, int]:
    """Read the JSON object at a position as a call; return the call and the position after it.

    JSON's syntax decides where the object ends, so marks within its strings are plain text. key: key of the arguments.
    """
    while position < len(text) and text[position].isspace():
        position += 1
    value, end = _decode_json(text, position)
    return (value if isinstance(value, MalformedCall) else _read_call(value, key)), end


def _decode_json(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON object or list at a position, or a MalformedCall, and the position after it."""
    if not text.startswith(("{", "["), position):  # the decoder's error would first count all lines before this one
        return MalformedCall("not valid JSON: Expecting value at character 1 of the call"), position
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        return MalformedCall(_explain_json_error(error, position)), position


def _read_call(value: Any, key: str) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(f"not a JSON object: {quote_line(json.dumps(value))}")
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return MalformedCall(f'no name: a call is {{"name": ..., "{key}": {{...}}}}')
    if isinstance(arguments, str):  # a string of JSON, as in the OpenAI API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return MalformedCall(f"{key} of {quote_line(name)} must be a JSON object")
    return ToolCall(name, arguments)


def _explain_json_error(error: Exception, start: int = 0) -> str:
    """Return why the JSON of a call is invalid, as text for the model. start: position at which the call begins."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start + 1} of the call"
    return f"not valid JSON: nested too deep (at most {MAX_LEVELS} levels are allowed), or a number too long"


def quote_line(text: str) -> str:
    """Return a text in quotes, as one short line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:60]}...")
