"""Conversion of the values that a model wrote to the types in a tool's schema. A schema from outside raises no error.

The conversion equals that of vLLM's parsers, so that a tool gets the same values as behind a serving engine. A test
compares both.
"""

import json
import math
from typing import Any

# JSON schema of each parameter, by the parameter's name.
Properties = dict[str, Any]
# Names of types that clients write instead of JSON schema's own.
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
}
_CHOICES = ("anyOf", "oneOf", "allOf")
# Marks that a text has no value of the tried type. None cannot mark this, because JSON's null is None.
_NO_VALUE = object()


def properties_of(tool: Any) -> Properties:
    """Return the schemas of a tool's parameters by their names; empty if the tool has no parameters."""
    schema = tool
    for key in ("function", "parameters", "properties"):
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def schema_types(schema: Any) -> list[str]:
    """Return the names of the types that a schema allows, each once; `string` if it names none.

    A schema may be any JSON value: `true` allows everything and names nothing. Unknown names are returned too.
    """
    names: list[str] = []
    if isinstance(schema, dict):
        kinds = schema.get("type")
        names += [
            _plain_name(kind) for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
        ]
        names += map(_type_name, list_at(schema, "enum"))
        for key in _CHOICES:
            for choice in list_at(schema, key):
                names += schema_types(choice)
    return list(dict.fromkeys(names)) or ["string"]


def list_at(schema: Any, key: str) -> list[Any]:
    """Return the list of a schema's key; empty if there is no list."""
    entries = schema.get(key) if isinstance(schema, dict) else None
    return entries if isinstance(entries, list) else []


def convert_arguments(arguments: dict[str, Any], properties: Properties) -> dict[str, Any]:
    """Return arguments with each value converted to a type of its schema. A value without a schema stays."""
    return {
        name: _convert_value(value, properties[name]) if isinstance(properties.get(name), dict) else value
        for name, value in arguments.items()
    }


def convert_text(text: str, schema: Any) -> Any:
    """Return the value of a text in the schema's first type that fits, else as JSON, else the text itself.

    Types are tried in this order: null, integer, number, boolean, object, array, string.
    """
    kinds = set(schema_types(schema))
    if "null" in kinds and text.lower() == "null":
        return None
    for kind, read in (("integer", _read_integer), ("number", _read_number), ("boolean", _read_boolean)):
        if kind in kinds and (value := read(text)) is not _NO_VALUE:
            return value
    if "string" in kinds and not kinds & {"object", "array"}:
        return text
    value = _read_json(text)
    return text if value is _NO_VALUE else value


def _convert_value(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return convert_text(value, schema)
    if isinstance(value, dict):
        properties = schema.get("properties")
        return convert_arguments(value, properties) if isinstance(properties, dict) else value
    if isinstance(value, list):
        inner_schema = schema.get("items")
        return [_convert_value(inner, inner_schema) for inner in value] if isinstance(inner_schema, dict) else value
    # A number, a boolean or null is converted from its JSON text: 3 becomes "3" where the schema wants a string.
    return convert_text(json.dumps(value), schema)


def _plain_name(kind: str) -> str:
    name = kind.strip().lower()
    return _ALIASES.get(name, name)


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _read_integer(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return _NO_VALUE


def _read_number(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return _NO_VALUE
    if not math.isfinite(number):
        return _NO_VALUE
    return int(number) if number == int(number) else number


def _read_boolean(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower().strip(), _NO_VALUE)


def _read_json(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NO_VALUE
    return value
