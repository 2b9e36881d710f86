"""Tool calls in the text of one assistant turn, parsed by the model family's format.

Parsing reads a decoded copy and never changes what was sampled. Text is decoded with special tokens kept, since some
formats mark calls with them; tokens that end a turn may be left on it. A call inside a thinking block is no call.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlctl.utils.user_code import MAX_LEVELS, is_too_deep

_DECODER = json.JSONDecoder()
# Calls of a turn, and characters of one call's arguments and name. A call beyond a bound is answered, and not made.
MAX_CALLS, MAX_ARGUMENTS, MAX_NAME = 256, 1 << 18, 200
_MARK = re.compile(r"</?tool_call>")
_BETWEEN = re.compile(r"[\s;]*")


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
# Names of tools -> schemas of their parameters. Formats without types of their own read values by it.
Parameters = dict[str, dict[str, Any]]
Parser = Callable[[str, Parameters], tuple[list[Call], str]]


@dataclass(frozen=True)
class ParsedMessage:
    """One assistant turn: its calls in order, and its text outside of calls and thinking."""

    content: str
    calls: list[Call]


def tool_format(chat_template: str | None) -> str | None:
    """Return the name of the format in which a model with this template calls tools; None if it has none of ours."""
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


def parse_tool_calls(text: str, format: str, tools: list[dict[str, Any]]) -> ParsedMessage:
    """Return the calls in `text` and the text around them.

    format: a key of `PARSERS`. tools: schemas of the tools, as `tool_schema` makes them.
    """
    parameters = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in tools}
    calls, content = PARSERS[format](text.rpartition("</think>")[2].partition("<think>")[0], parameters)
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [MalformedCall(f"one of {len(calls):,} in a turn, and at most {MAX_CALLS} are called")]
    return ParsedMessage(content.strip(), [_bounded(each) for each in calls])


def _hermes(text: str, parameters: Parameters) -> tuple[list[Call], str]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes).

    A call that the end of the turn closes is taken, as serving engines take it.
    """
    calls: list[Call] = []
    outside: list[str] = []
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        outside.append(text[at:start])
        call, end = _json_call(text, start + len("<tool_call>"), "arguments")
        # After a mistake the next call begins at its own mark: what is between belongs to the broken one.
        mark = _MARK.search(text, end)
        at = len(text) if mark is None else mark.end() if mark[0] == "</tool_call>" else mark.start()
        if isinstance(call, ToolCall) and mark and (between := text[end : mark.start()].strip()):
            call = MalformedCall(f"not one JSON object: {_shown(between)} follows it before </tool_call>")
        elif isinstance(call, ToolCall) and mark is None:
            outside.append(text[end:])
        calls.append(call)
    return calls, "".join([*outside, text[at:]])


def _llama3(text: str, parameters: Parameters) -> tuple[list[Call], str]:
    """Parse `{"name": ..., "parameters": {...}}`, also after `<|python_tag|>`, several separated by `;`."""
    before, marked, rest = text.rpartition("<|python_tag|>")
    rest = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)\s*$", "", rest).strip()
    if not rest.startswith("{") or not (marked or '"name"' in rest):
        error = MalformedCall(f"not a JSON object: {_shown(rest)}")
        return ([error], before) if marked else ([], text)
    calls: list[Call] = []
    at = 0
    while rest.startswith("{", at):
        call, end = _json_call(rest, at, "parameters")
        calls.append(call)
        at = _BETWEEN.match(rest, end).end() if isinstance(call, ToolCall) else len(rest)  # type: ignore[union-attr]
    return calls, before + rest[at:]


def _mistral(text: str, parameters: Parameters) -> tuple[list[Call], str]:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name{...}`."""
    content, marked, rest = text.partition("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in rest.split("[TOOL_CALLS]") if marked else ():
        part = part.removesuffix("</s>").strip()
        if part.startswith("["):
            calls += _json_list(part)
        else:
            name, brace, arguments = part.partition("{")
            name = name.removesuffix("[ARGS]").strip()
            whole = f'{{"name": {json.dumps(name)}, "arguments": {brace}{arguments}}}'
            calls.append(_json_call(whole, 0, "arguments")[0])
    return calls, content


def _json_list(text: str) -> Iterator[Call]:
    try:
        listed, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        yield MalformedCall(_not_json(error))
        return
    for each in listed:
        yield _checked(each, "arguments")


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*(?:</tool_call>|\Z)", re.DOTALL)


def _qwen3_coder(text: str, parameters: Parameters) -> tuple[list[Call], str]:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5).

    Values have no type in the text: they are read by the parameter's schema.
    """
    calls: list[Call] = []
    outside, *parts = text.split("<tool_call>")
    for part in parts:
        if found := _FUNCTION.match(part):
            name = found[1].strip()
            calls.append(_coder_call(name, found[2], parameters.get(name, {})))
            outside += part[found.end() :]
        else:
            calls.append(MalformedCall("not <function=NAME><parameter=KEY>value</parameter></function> in <tool_call>"))
            outside += part.partition("</tool_call>")[2]
    return calls, outside


def _coder_call(name: str, body: str, known: dict[str, Any]) -> Call:
    """Return the call of a function's body. known: schemas of its parameters."""
    arguments: dict[str, Any] = {}
    rest = body.strip()
    while rest:
        head, closed, after = rest.partition("</parameter>")
        key, bracket, value = head.removeprefix("<parameter=").partition(">")
        if not closed or not bracket or not head.startswith("<parameter="):
            return MalformedCall(f"{_shown(rest)} is no <parameter=KEY>value</parameter>")
        arguments[key.strip()] = _value(value.removeprefix("\n").removesuffix("\n"), known.get(key.strip(), {}))
        rest = after.strip()
    return ToolCall(name, arguments)


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return the value of a text that has no type of its own; the text itself where it is none of the schema's type."""
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
    if not text.startswith(("{", "["), at):  # the decoder would say so too, after counting all lines before
        return MalformedCall("not valid JSON: Expecting value at character 1 of the call"), at
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return MalformedCall(_not_json(error, at)), at
    return _checked(value, key), end


def _checked(value: Any, key: str) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(f"not a JSON object: {_shown(json.dumps(value))}")
    name, arguments = value.get("name"), value.get(key, value.get("arguments", value.get("parameters", {})))
    if not isinstance(name, str) or not name:
        return MalformedCall(f'no name: a call is {{"name": ..., "{key}": {{...}}}}')
    if isinstance(arguments, str):  # JSON within JSON, as the OpenAI API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return MalformedCall(f"{key} of {_shown(name)} must be a JSON object")
    return ToolCall(name, arguments)


def _bounded(call: Call) -> Call:
    """Return a call, or the reason why it is not made."""
    if isinstance(call, MalformedCall):
        return call
    if len(call.name) > MAX_NAME:
        return MalformedCall(f"a name of {len(call.name):,} characters, and at most {MAX_NAME} are allowed")
    if not _is_text(call.name):
        return MalformedCall("a name with half of a character (a lone surrogate)")
    arguments = f"arguments of {_shown(call.name)}"
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


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _not_json(error: Exception, start: int = 0) -> str:
    """Return the reason for the model. start: position at which the call begins."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start + 1} of the call"
    return f"not valid JSON: nested too deep (at most {MAX_LEVELS} levels are allowed), or a number too long"


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:60]}...")
