"""Tool calls in a text, found by the format of a model family. Each format takes the same text as vLLM's own parser."""

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
    """Something that was meant as a call. The model is told why it is none."""

    error: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class FoundCall:
    """A call, and where the turn has it."""

    call: Call
    # First character, and the one after the last.
    start: int
    end: int


# Schemas of the parameters of each tool, by its name. Formats that convert values read them.
Parameters = dict[str, Properties]
Parser = Callable[[str, Parameters], list[FoundCall]]


def tool_format(template: str) -> str | None:
    """Return the name of the format in which a model with this template calls tools; None if the template has no known
    format."""
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


def _hermes(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes).

    A call that the end of the turn closes is taken, as serving engines take it.
    """
    found: list[FoundCall] = []
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        call, end = _json_call(text, start + len("<tool_call>"), "arguments")
        # After a mistake the next call begins at its own mark: the text between belongs to the broken one.
        mark = _CALL_MARK.search(text, end)
        at = len(text) if mark is None else mark.end() if mark[0] == "</tool_call>" else mark.start()
        if isinstance(call, ToolCall) and mark and (between := text[end : mark.start()].strip()):
            call = MalformedCall(f"not one JSON object: {shown(between)} follows it before the call's end")
        found.append(FoundCall(call, start, end if isinstance(call, ToolCall) and mark is None else at))
    return found


_TAG = "<|python_tag|>"


def _llama3(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `{"name": ..., "parameters": {...}}`, anywhere in the text, also after `<|python_tag|>`.

    JSON that is no call is text. The first brace that begins no JSON ends the search, with everything inside.
    """
    found: list[FoundCall] = []
    at = 0
    while (start := text.find("{", at)) >= 0:
        before = text[at:start]
        tagged, bare = before.rstrip().endswith(_TAG), not before.strip(" \t\r\n;")
        value, end = _json_at(text, start)
        if isinstance(value, MalformedCall):
            if tagged or (bare and '"name"' in text[start:]):
                found.append(FoundCall(value, start, len(text)))
            break
        given = "parameters" in value or "arguments" in value or (bare and str(value.get("name")) in parameters)
        if tagged or ("name" in value and given):
            found.append(
                FoundCall(_checked_call(value, "parameters"), text.rindex(_TAG, at, start) if tagged else start, end)
            )
        at = end
    if not found and (tag := text.find(_TAG)) >= 0:
        rest = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)\s*$", "", text[tag + len(_TAG) :])
        found.append(FoundCall(MalformedCall(f"not a JSON object: {shown(rest)}"), tag, len(text)))
    return found


# Possessive: a turn of blanks alone would cost the cube of its length to go back through.
_MISTRAL_MARK = re.compile(r"\[TOOL_CALLS\](?:\s*+\[TOOL_CALLS\])*+\s*+")
_MISTRAL_HEAD = re.compile(r"([^\[\]{}]*+)(?:\[CALL_ID\][^\[\]{}]*+)?(?:\[ARGS\]\s*+)?(?=\{)")


def _mistral(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.

    The id and the mark before the arguments may be left out. The values behind a name are converted by its schema. A
    list may follow words that are no list, and marks behind it are none.
    """
    found: list[FoundCall] = []
    mark = _MISTRAL_MARK.search(text)
    while mark:
        following = _MISTRAL_MARK.search(text, mark.end())
        head = _MISTRAL_HEAD.match(text, mark.end())
        name = head[1].strip() if head else ""
        value, end = _json_at(text, head.end() if head and name else mark.end())
        if isinstance(value, MalformedCall) and not name:
            segment_end = following.start() if following else len(text)
            value, end = _bracketed(text, mark.end(), segment_end) or (value, segment_end)
        if isinstance(value, MalformedCall):
            found.append(FoundCall(value, mark.start(), following.start() if following else len(text)))
            mark = following
            continue
        if name and isinstance(value, dict):
            value = {"name": name, "arguments": convert_arguments(value, parameters.get(name, {}))}
        begin = mark.start()
        for call in value if isinstance(value, list) else [value]:
            found.append(FoundCall(_checked_call(call, "arguments"), begin, end))
            begin = end
        is_list = isinstance(value, list) or (not name and "name" in value)
        # Marks within the value are none.
        mark = None if is_list else _MISTRAL_MARK.search(text, end)
    return found


def _bracketed(text: str, begin: int, end: int) -> tuple[Any, int] | None:
    """Return the JSON list of objects between two positions, and the position after it; None if there is none."""
    opening = text.find("[{", begin, end)
    closing = text.rfind("}]", begin, end) + len("}]")
    if opening < 0 or closing <= opening:
        return None
    try:
        return json.loads(text[opening:closing]), closing
    except (ValueError, RecursionError):
        return None


_CODER_MARK = re.compile(r"<tool_call>\s*(?:<function=)?|<function=")
_CODER_END = re.compile(r"</tool_call>|<tool_call>|<function=")
_CODER_OUTER_END = re.compile(r"\s*</tool_call>")
_VALUE_END = re.compile(r"</parameter>|(?=<parameter=)")


def _qwen3_coder(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5).

    The outer marks may be left out, and the end of a function or of a parameter where the next one follows. Values have
    no type in the text: they are read by the parameter's schema.
    """
    found: list[FoundCall] = []
    at = 0
    while mark := _CODER_MARK.search(text, at):
        call, end = _coder_call(text, mark.end(), parameters, opened=mark[0].endswith("="))
        if isinstance(call, MalformedCall):
            closing = _CODER_END.search(text, end)
            end = len(text) if closing is None else closing.start()
        if outer := _CODER_OUTER_END.match(text, end):
            end = outer.end()
        found.append(FoundCall(call, mark.start(), end))
        at = end
    return found


def _coder_call(text: str, at: int, known: Parameters, *, opened: bool) -> tuple[Call, int]:
    """Return the call whose name begins at `at`, and the position after it. opened: `<function=` is before it."""
    name = re.compile(r"[^<>\n]+>").match(text, at) if opened else None
    if name is None:
        return MalformedCall("not <function=NAME><parameter=KEY>value</parameter></function>"), at
    call = ToolCall(name[0][:-1].strip(), {})
    at = name.end()
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if text.startswith("</function>", at):
            at += len("</function>")
            break
        if _CODER_END.match(text, at):
            break
        key = re.compile(r"<parameter=([^>\n]+)>").match(text, at)
        closed = _VALUE_END.search(text, key.end()) if key else None
        if key is None or closed is None:
            rest = text[at : at + 200]
            what = f"{shown(rest)} is no <parameter=KEY>value</parameter>" if rest else "without </function>"
            return MalformedCall(what), at
        value = text[key.end() : closed.start()].removeprefix("\n").removesuffix("\n")
        call.arguments[key[1].strip()] = value
        at = closed.end()
    return ToolCall(call.name, convert_arguments(call.arguments, known.get(call.name, {}))), at


# A call in words, as the model is told: marks in them would be text, and no tokens of the model's.
FORMS = {
    "hermes": "JSON with name and arguments, between the opening and the closing mark tool_call",
    "llama3": "JSON with name and parameters",
    "mistral": "the mark TOOL_CALLS and a list of JSON with name and arguments",
    "qwen3_coder": "<function=NAME><parameter=KEY>value</parameter></function>, within the marks tool_call",
}
PARSERS: dict[str, Parser] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}


def _json_call(text: str, at: int, key: str) -> tuple[Call, int]:
    """Return the call that the JSON object at position `at` is, and the position after it.

    The object ends where JSON says, so that marks within its strings are no marks. key: that of the arguments.
    """
    while at < len(text) and text[at].isspace():
        at += 1
    value, end = _json_at(text, at)
    return (value if isinstance(value, MalformedCall) else _checked_call(value, key)), end


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON object or list at position `at`, or a MalformedCall, and the position after it."""
    if not text.startswith(("{", "["), at):  # the decoder would say so too, after counting all lines before
        return MalformedCall("not valid JSON: Expecting value at character 1 of the call"), at
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return MalformedCall(_not_json(error, at)), at


def _checked_call(value: Any, key: str) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(f"not a JSON object: {shown(json.dumps(value))}")
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return MalformedCall(f'no name: a call is {{"name": ..., "{key}": {{...}}}}')
    if isinstance(arguments, str):  # JSON within JSON, as the OpenAI API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return MalformedCall(f"{key} of {shown(name)} must be a JSON object")
    return ToolCall(name, arguments)


def _not_json(error: Exception, start: int = 0) -> str:
    """Return the reason for the model. start: position at which the call begins."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start + 1} of the call"
    return f"not valid JSON: nested too deep (at most {MAX_LEVELS} levels are allowed), or a number too long"


def shown(text: str) -> str:
    """Return a text in quotes, as one short line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:60]}...")
