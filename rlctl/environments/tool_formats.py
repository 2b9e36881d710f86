"""Tool calls in a text, found by the format of a model family. Each format takes the same text as vLLM's own parser."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


# Names of tools -> schemas of their parameters. Formats without types read values by this schema.
Parameters = dict[str, dict[str, Any]]
Parser = Callable[[str, Parameters], list[FoundCall]]


def tool_format(chat_template: str | None) -> str | None:
    """Return the name of the format in which a model with this template calls tools; None if the template has no known
    format."""
    template = chat_template or ""
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


_MARK = re.compile(r"</?tool_call>")


def _hermes(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes).

    A call that the end of the turn closes is taken, as serving engines take it.
    """
    found: list[FoundCall] = []
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        call, end = _json_call(text, start + len("<tool_call>"), "arguments")
        # After a mistake the next call begins at its own mark: the text between belongs to the broken one.
        mark = _MARK.search(text, end)
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
        value, end = _json(text, start)
        if isinstance(value, MalformedCall):
            if tagged or (bare and '"name"' in text[start:]):
                found.append(FoundCall(value, start, len(text)))
            break
        given = "parameters" in value or "arguments" in value or (bare and str(value.get("name")) in parameters)
        if tagged or ("name" in value and given):
            found.append(
                FoundCall(_checked(value, "parameters"), text.rindex(_TAG, at, start) if tagged else start, end)
            )
        at = end
    if not found and (tag := text.find(_TAG)) >= 0:
        rest = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)\s*$", "", text[tag + len(_TAG) :])
        found.append(FoundCall(MalformedCall(f"not a JSON object: {shown(rest)}"), tag, len(text)))
    return found


# Possessive: a turn of blanks alone would cost the cube of its length to go back through.
_MISTRAL_HEAD = re.compile(r"([^\[\]{}]*+)(?:\[CALL_ID\][^\[\]{}]*+)?(?:\[ARGS\]\s*+)?(?=\{)")


def _mistral(text: str, parameters: Parameters) -> list[FoundCall]:
    """Find `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.

    The id and the mark before the arguments may be left out.
    """
    found: list[FoundCall] = []
    mark, at = "[TOOL_CALLS]", 0
    while (start := text.find(mark, at)) >= 0:
        begin = start + len(mark)
        head = _MISTRAL_HEAD.match(text, begin)
        name = head[1].strip() if head else ""
        listed = not name
        while listed and begin < len(text) and text[begin].isspace():
            begin += 1
        value, end = _json(text, begin if listed or head is None else head.end())
        if isinstance(value, MalformedCall):
            at = text.find(mark, begin)
            at = len(text) if at < 0 else at
            found.append(FoundCall(value, start, at))
            continue
        named = value if listed else {"name": name, "arguments": value}
        for each in named if isinstance(named, list) else [named]:
            found.append(FoundCall(_checked(each, "arguments"), max(start, at), end))
            at = end
        at = end
    return found


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
    call, at = ToolCall(name[0][:-1].strip(), {}), name.end()
    schemas = known.get(call.name, {})
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if text.startswith("</function>", at):
            return call, at + len("</function>")
        if _CODER_END.match(text, at):
            return call, at
        key = re.compile(r"<parameter=([^>\n]+)>").match(text, at)
        closed = _VALUE_END.search(text, key.end()) if key else None
        if key is None or closed is None:
            rest = text[at : at + 200]
            what = f"{shown(rest)} is no <parameter=KEY>value</parameter>" if rest else "without </function>"
            return MalformedCall(what), at
        value = text[key.end() : closed.start()].removeprefix("\n").removesuffix("\n")
        call.arguments[key[1].strip()] = _value(value, schemas.get(key[1].strip(), {}))
        at = closed.end()


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return the value of an untyped text; the text itself where it is no value of the schema's type."""
    wanted = schema.get("type")
    if schema.get("nullable") and text.strip() in ("null", "None"):
        return None
    if wanted == "string" or not schema:
        return text
    if wanted == "boolean" and text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


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
    value, end = _json(text, at)
    return (value if isinstance(value, MalformedCall) else _checked(value, key)), end


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON object or list at position `at`, or a MalformedCall, and the position after it."""
    if not text.startswith(("{", "["), at):  # the decoder would say so too, after counting all lines before
        return MalformedCall("not valid JSON: Expecting value at character 1 of the call"), at
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return MalformedCall(_not_json(error, at)), at


def _checked(value: Any, key: str) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(f"not a JSON object: {shown(json.dumps(value))}")
    name, arguments = value.get("name"), value.get(key, value.get("arguments", value.get("parameters", {})))
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


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _not_json(error: Exception, start: int = 0) -> str:
    """Return the reason for the model. start: position at which the call begins."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start + 1} of the call"
    return f"not valid JSON: nested too deep (at most {MAX_LEVELS} levels are allowed), or a number too long"


def shown(text: str) -> str:
    """Return a text in quotes, as one short line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:60]}...")
