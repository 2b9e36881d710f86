"""JSON schema of a tool, made from its type hints and its Google-style docstring.

The output equals that of transformers' `get_json_schema`, as chat templates and TRL expect; a test compares both. That
function imports torch (seconds, and base installs have none), so this one is rlctl's own.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from rlctl.utils.user_code import error_text

Schema = dict[str, Any]

_BASIC: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"\s*(?:Args|Returns|Raises):")
_ARGS = re.compile(r"\n\s*Args:\n(.*?)(?:Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n(.*?)(?:Raises:|\Z)", re.DOTALL)
_ENTRY = re.compile(r"\s*(\w+):(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class SchemaError(ValueError):
    """A tool whose schema cannot be made. args: a line for each problem, which names the parameter and the remedy."""


def tool_schema(tool: Callable[..., Any]) -> Schema:
    """Return `{"type": "function", "function": {name, description, parameters, return}}` of a function or method.

    `self` is left out. Raises SchemaError for a tool without docstring, and for a parameter without a type hint, with a
    hint that JSON has no type for, or without a description below `Args:`.
    """
    doc = (inspect.getdoc(tool) or "").strip()
    problems = (
        []
        if doc
        else ["has no docstring: the model reads it as the tool's description (a method named _... is no tool)"]
    )
    problems += _unhinted(tool)
    name = tool.__name__
    description, described, returned = _docstring(doc)
    hints = _hints(tool, problems)
    returns = hints.pop("return", None)
    parameters = {}
    for each, hint in hints.items():
        try:
            parameters[each] = _parameter(each, hint, described)
        except SchemaError as error:
            problems += error.args * bool(doc)
    if problems:
        raise SchemaError(*problems)
    required = [each.name for each in _visible(tool) if each.default is each.empty]
    schema: Schema = {"type": "object", "properties": parameters}
    if required:
        schema["required"] = required
    function: Schema = {"name": name, "description": description, "parameters": schema}
    if returns is not None:
        function["return"] = _typed("return", returns) | ({} if returned is None else {"description": returned})
    return {"type": "function", "function": function}


def foreign_classes(tool: Callable[..., Any]) -> dict[str, str]:
    """Return the class that a parameter's hint names and JSON has no value for, by parameter.

    Its schema is an object, as transformers makes it, so that a call gives a dict. A TypedDict is one.
    """
    found = {name: next(_foreign(hint), None) for name, hint in _hints(tool, []).items() if name != "return"}
    return {name: getattr(kind, "__name__", str(kind)) for name, kind in found.items() if kind is not None}


def _foreign(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin is None:
        if hint not in _BASIC and not is_typeddict(hint):
            yield hint
    elif origin is not Literal:
        for each in get_args(hint):
            yield from _foreign(each)


def _visible(tool: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters without an implicit `self` or `cls`."""
    parameters = list(inspect.signature(tool).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        return parameters[1:]
    return parameters


def _unhinted(tool: Callable[..., Any]) -> list[str]:
    """Return a line for each parameter without a type hint."""
    problems = []
    for each in _visible(tool):
        if each.kind is each.VAR_POSITIONAL:
            problems.append(f"parameter *{each.name}: a call gives arguments by their names; write list[...]")
        elif each.annotation is each.empty:
            problems.append(f"parameter {each.name} has no type hint")
    return problems


def _hints(tool: Callable[..., Any], problems: list[str]) -> dict[str, Any]:
    """Read the type hint of each parameter, and of `return` if there is one. problems: gets a line if they fail."""
    try:
        hints = get_type_hints(tool)
    except (Exception, SystemExit) as error:  # a hint is code of the user's
        problems.append(f"its type hints cannot be read: {type(error).__name__}: {error_text(error)}")
        return {}
    return {name: hint for name, hint in hints.items() if name == "return" or not _is_positional(tool, name)}


def _is_positional(tool: Callable[..., Any], name: str) -> bool:
    return inspect.signature(tool).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL


def _parameter(name: str, hint: Any, described: dict[str, str]) -> Schema:
    if name not in described:
        raise SchemaError(f"parameter {name} has no description: add a line `{name}: ...` below `Args:`")
    schema, text = _typed(name, hint), described[name]
    if choices := _CHOICES.search(text):
        try:
            listed = json.loads(choices[1])
            if not isinstance(listed, list):
                raise ValueError(f"it is {choices[1]}")
        except ValueError as error:
            raise SchemaError(f"parameter {name}: (choices: ...) must be a JSON list: {error}") from error
        schema["enum"] = [each.strip() if isinstance(each, str) else each for each in listed]
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _typed(name: str, hint: Any) -> Schema:
    try:
        return _type(hint)
    except TypeError as error:
        raise SchemaError(f"parameter {name}: {error}") from error


def _type(hint: Any) -> Schema:
    """Return the schema of a type hint. Raises TypeError for one that JSON has no type for."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(_BASIC.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        if foreign := [each for each in arguments if type(each) not in _BASIC]:
            raise TypeError(f"{foreign[0]!r} of {hint} has no JSON type: use text, numbers, True, False or None")
        names = list(dict.fromkeys(_BASIC[type(each)]["type"] for each in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type(each) for each in arguments]}
    if origin is tuple:
        raise TypeError(f"{hint} has no JSON type: use list[...]")
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    raise TypeError(f"{hint} has no JSON type: use str, int, float, bool, list, dict, Literal or a union of them")


def _union(members: tuple[Any, ...]) -> Schema:
    parts = [_type(each) for each in members if each is not type(None)]
    plain = all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts)
    if len(parts) == 1:
        schema = parts[0]
    elif plain:
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return {**schema, "nullable": True} if type(None) in members else schema


def _docstring(doc: str) -> tuple[str, dict[str, str], str | None]:
    """Return description, description of each argument, and description of the returned value if there is one."""
    head = _SECTION.search(doc)
    described: dict[str, list[str]] = {}
    last = ["text before the first argument"]
    found = _ARGS.search(doc)
    for line in filter(str.strip, found[1].splitlines() if found else ()):
        # The line below a bare `x:` is its description, in any form.
        if last and (entry := _ENTRY.match(line)):
            last = described[entry[1]] = [entry[2].strip()] if entry[2].strip() else []
        else:
            last.append(line.strip())
    joined = {name: " ".join(lines) for name, lines in described.items()}
    returned = _RETURNS.search(doc)
    return doc[: head.start()].strip() if head else doc, joined, returned[1].strip() if returned else None
