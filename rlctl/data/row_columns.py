"""Columns with a meaning in other training tools: tools, a system message, arguments of the template, pictures.

Each column of the table `KNOWN_COLUMNS` is read, refused, or ignored and counted.
"""

import json
from collections.abc import Mapping
from typing import Any

from rlctl.config.data_schema import DatasetSection
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.nested_columns import KNOWN_COLUMNS, columns_of, is_empty

_SCHEMAS = "a list of JSON schemas of functions, {type: function, function: {name, ...}}, or its JSON text"


def refuse_media(row: Row) -> None:
    """Raise DataError for a row with pictures, films or sounds."""
    for column in KNOWN_COLUMNS:
        if column.use == "refused" and not is_empty(row.values.get(column.name)):
            problem = f"column {column.name!r} holds {column.meaning}, and rlctl trains on text alone"
            raise DataError(f"{row.origin}: {problem}: leave these rows or the column out")


def row_tools(row: Row) -> list[dict[str, Any]]:
    """Return the JSON schemas of the functions that a row shows the model, from `tools` or another known column.

    Raises DataError if the column `tools` has another value.
    """
    for name in _filled_columns(row.values, "tools"):
        schemas = _read_schemas(row.values[name])
        if schemas is None and name == "tools":
            raise DataError(f"{row.origin}: column 'tools' must be {_SCHEMAS}")
        if schemas:
            return schemas
    return []


def system_text(row: Row) -> str:
    """Return the text of the row's system column, the first that holds text; empty if none does."""
    texts = [row.values[name] for name in _filled_columns(row.values, "system")]
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def template_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments of the chat template. Raises DataError unless they are an object or its JSON text."""
    name = first_column(values, "template")
    arguments = values[name] if name else {}
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise DataError(f"column {name!r} must be an object such as {{enable_thinking: false}}")
    return arguments


def describe_columns(
    row: Row, section: DatasetSection, messages: list[dict[str, Any]], *, shows_tools: bool
) -> tuple[list[str], list[str]]:
    """Return (texts on columns read under another tool's name, texts on ignored columns).

    messages: the row's chat; empty if an environment begins the chat. shows_tools: False for an environment or an
    agent, which shows its own tools.
    """
    read, ignored = _describe_tools(row) if shows_tools else ([], _unshown_tools(row))
    text = system_text(row)
    # True if the chat begins with the text of the row's system column.
    is_opening = bool(messages) and bool(text) and messages[0]["content"] == text
    for name in _filled_columns(row.values, "system"):
        if is_opening and row.values[name] == text:
            read.append(f"a system message in column {name!r}")
        elif messages:
            ignored.append(f"a column {name!r} that is no text, or comes beside a system message")
        else:
            ignored.append(f"a column {name!r} without a prompt that it could stand before")
    keys = {key.partition(".")[0] for key in (section.messages_key, section.prompt_key, section.answer_key)}
    for column in KNOWN_COLUMNS:
        if column.use == "ignored" and column.name not in keys and not is_empty(row.values.get(column.name)):
            ignored.append(f"a column {column.name!r} ({column.meaning})")
    return read, ignored


def first_column(values: Mapping[str, Any], use: str) -> str:
    """Return the name of the first column of a use that is not empty in the row; an empty text if there is none."""
    return next(iter(_filled_columns(values, use)), "")


def _filled_columns(values: Mapping[str, Any], use: str) -> list[str]:
    """Return the names of the columns of a use that are not empty in the row."""
    return [name for name in columns_of(use) if not is_empty(values.get(name))]


def _describe_tools(row: Row) -> tuple[list[str], list[str]]:
    """Return (texts on columns of tools read under another name, texts on ignored columns of tools)."""
    read = list[str]()
    ignored = list[str]()
    tools_column = ""
    for name in _filled_columns(row.values, "tools"):
        schemas = _read_schemas(row.values[name])
        if schemas and tools_column:
            ignored.append(f"a column {name!r} beside the tools of column {tools_column!r}")
        elif schemas:
            tools_column = name
            if name != "tools":
                read.append(f"tools in column {name!r}")
        elif schemas is None:
            ignored.append(f"a column {name!r}, which is not {_SCHEMAS}")
    return read, ignored


def _unshown_tools(row: Row) -> list[str]:
    """Return texts on a row's columns of tools, which are ignored because the environment or agent shows its own."""
    reason = "the environment or the agent shows tools of its own"
    return [f"a column {name!r} ({reason})" for name in _filled_columns(row.values, "tools")]


def _parse_json(text: str) -> Any:
    """Return the value of a text of JSON; None for another text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_schemas(tools: Any) -> list[dict[str, Any]] | None:
    """Return a column's schemas of functions in the form for chat templates; None if the value is no such list."""
    if isinstance(tools, str):
        tools = _parse_json(tools) if tools.strip() else []
    if not isinstance(tools, list):
        return None
    schemas = list[dict[str, Any]]()
    for tool in tools:
        schema = _parse_json(tool) if isinstance(tool, str) else tool
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        schemas.append({"type": "function", **schema} if "function" in schema else _wrap(schema))
    return schemas


def _wrap(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}
