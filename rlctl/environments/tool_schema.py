"""JSON schema of a tool, made from its type hints and its Google-style docstring.

The output equals that of transformers' `get_json_schema`, as chat templates and TRL expect; a test compares both.
rlctl has its own function, because transformers' imports torch, which takes seconds and is missing in a base install.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_ARGUMENT = re.compile(r"\s*(\w+):(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class SchemaError(ValueError):
    """A tool whose schema cannot be made. args: one line for each problem, with the parameter and the remedy."""


def tool_schema(tool: Callable[..., Any]) -> Schema:
    """Return `{"type": "function", "function": {name, description, parameters, return}}` of a function or method.

    `self` is left out. Raises SchemaError for a tool without docstring, and for a parameter without a type hint, with a
    hint that JSON has no type for, or without a description below `Args:`.
    """
    doc = (inspect.getdoc(tool) or "").strip()
    problems: list[str] = []
    if not doc:
        problem = "has no docstring: the model reads it as the tool's description (a method named _... is no tool)"
        problems.append(problem)
    problems += _hint_problems(tool)
    docstring = _read_docstring(doc)
    hints = _read_hints(tool, problems)
    returns = hints.pop("return", None)
    parameters = {}
    for parameter_name, hint in hints.items():
        try:
            parameters[parameter_name] = _parameter_schema(parameter_name, hint, docstring.arguments)
        except SchemaError as error:
            if doc:  # without a docstring each parameter would only repeat the first problem
                problems += error.args
    if problems:
        raise SchemaError(*problems)
    required = [parameter.name for parameter in _visible_parameters(tool) if parameter.default is parameter.empty]
    schema: Schema = {"type": "object", "properties": parameters}
    if required:
        schema["required"] = required
    function: Schema = {"name": tool.__name__, "description": docstring.description, "parameters": schema}
    if returns is not None:
        function["return"] = _read_type("return", returns)
        if docstring.returned_value is not None:
            function["return"]["description"] = docstring.returned_value
    return {"type": "function", "function": function}


def foreign_classes(tool: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters whose type hint has a class without a JSON type, each with the name of that class.

    The schema of such a class is `object`, as in transformers, so the tool gets a dict. A TypedDict is a dict.
    """
    names: dict[str, str] = {}
    for parameter_name, hint in _read_hints(tool, []).items():
        foreign_class = next(_find_foreign(hint), None)
        if parameter_name != "return" and foreign_class is not None:
            names[parameter_name] = getattr(foreign_class, "__name__", str(foreign_class))
    return names


def _find_foreign(hint: Any) -> Iterator[Any]:
    """Yield the classes in a type hint that have no JSON type."""
    origin = get_origin(hint)
    if origin is None:
        if hint not in _BASIC and not is_typeddict(hint):
            yield hint
    elif origin is not Literal:
        for argument in get_args(hint):
            yield from _find_foreign(argument)


def _visible_parameters(tool: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters without an implicit `self` or `cls`."""
    parameters = list(inspect.signature(tool).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        return parameters[1:]
    return parameters


def _hint_problems(tool: Callable[..., Any]) -> list[str]:
    """Return a line for each parameter without a type hint."""
    problems = []
    for parameter in _visible_parameters(tool):
        if parameter.kind is parameter.VAR_POSITIONAL:
            problems.append(f"parameter *{parameter.name}: a call gives arguments by their names; write list[...]")
        elif parameter.annotation is parameter.empty:
            problems.append(f"parameter {parameter.name} has no type hint")
    return problems


def _read_hints(tool: Callable[..., Any], problems: list[str]) -> dict[str, Any]:
    """Read the type hint of each parameter, and of `return` if there is one.

    problems: gets a line if the hints cannot be read.
    """
    try:
        hints = get_type_hints(tool)
    except (Exception, SystemExit) as error:  # a hint is the user's code
        problems.append(f"its type hints cannot be read: {type(error).__name__}: {error_text(error)}")
        return {}
    return {name: hint for name, hint in hints.items() if name == "return" or not _is_positional(tool, name)}


def _is_positional(tool: Callable[..., Any], name: str) -> bool:
    return inspect.signature(tool).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL


def _parameter_schema(name: str, hint: Any, descriptions: dict[str, str]) -> Schema:
    if name not in descriptions:
        raise SchemaError(f"parameter {name} has no description: add a line `{name}: ...` below `Args:`")
    schema = _read_type(name, hint)
    description = descriptions[name]
    if choices := _CHOICES.search(description):
        try:
            values = json.loads(choices[1])
            if not isinstance(values, list):
                raise ValueError(f"it is {choices[1]}")
        except ValueError as error:
            raise SchemaError(f"parameter {name}: (choices: ...) must be a JSON list: {error}") from error
        schema["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        description = description[: choices.start()].strip()
    return {**schema, "description": description}


def _read_type(name: str, hint: Any) -> Schema:
    try:
        return _type_schema(hint)
    except TypeError as error:
        raise SchemaError(f"parameter {name}: {error}") from error


def _type_schema(hint: Any) -> Schema:
    """Return the schema of a type hint. Raises TypeError for a hint without a JSON type."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is None:
        return dict(_BASIC.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _union_schema(arguments)
    if origin is Literal:
        if foreign := [value for value in arguments if type(value) not in _BASIC]:
            raise TypeError(f"{foreign[0]!r} of {hint} has no JSON type: use text, numbers, True, False or None")
        names = list(dict.fromkeys(_BASIC[type(value)]["type"] for value in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(argument) for argument in arguments]}
    if origin is tuple:
        raise TypeError(f"{hint} has no JSON type: use list[...]")
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    raise TypeError(f"{hint} has no JSON type: use str, int, float, bool, list, dict, Literal or a union of them")


def _union_schema(members: tuple[Any, ...]) -> Schema:
    parts = [_type_schema(member) for member in members if member is not type(None)]
    has_types_alone = all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts)
    if len(parts) == 1:
        schema = parts[0]
    elif has_types_alone:
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return {**schema, "nullable": True} if type(None) in members else schema


@dataclass(frozen=True)
class _Docstring:
    """Descriptions in a docstring."""

    # Text before the first section.
    description: str
    # Description of each argument, by the argument's name.
    arguments: dict[str, str]
    # Description of the result; None without a section `Returns:`.
    returned_value: str | None


def _read_docstring(doc: str) -> _Docstring:
    """Return the descriptions in a docstring of Google's style."""
    lines_by_name: dict[str, list[str]] = {}
    # Lines of the last argument; before the first argument they belong to no name.
    last_lines = ["text before the first argument"]
    section = _ARGS.search(doc)
    for line in filter(str.strip, section[1].splitlines() if section else ()):
        argument = _ARGUMENT.match(line)
        # The line below a bare `x:` describes x, even if the line looks like `y: ...`.
        if last_lines and argument:
            description = argument[2].strip()
            last_lines = [description] if description else []
            # Shared on purpose: the argument's further lines are appended to the same list.
            lines_by_name[argument[1]] = last_lines
        else:
            last_lines.append(line.strip())
    first_section = _SECTION.search(doc)
    returns = _RETURNS.search(doc)
    return _Docstring(
        description=doc[: first_section.start()].strip() if first_section else doc,
        arguments={name: " ".join(lines) for name, lines in lines_by_name.items()},
        returned_value=returns[1].strip() if returns else None,
    )
