"""Columns that tools for training give a meaning: tools, a system message, arguments of the template, pictures.

The table is `KNOWN_COLUMNS`. A column of the table is read, refused, or ignored and counted.
"""

import json
from collections.abc import Mapping
from typing import Any

from rlctl.config.data_schema import DatasetSection
from rlctl.data.columns import KNOWN_COLUMNS, columns_of, is_empty
from rlctl.data.datasets import Row
from rlctl.data.files import DataError

_SCHEMAS = "a list of JSON schemas of functions, {type: function, function: {name, ...}}, or its JSON text"


def refuse_media(row: Row) -> None:
    """Raise DataError for a row with pictures, films or sounds."""
    for column in KNOWN_COLUMNS:
        if column.use == "refused" and not is_empty(row.values.get(column.name)):
            what = f"column {column.name!r} holds {column.meaning}, and rlctl trains on text alone"
            raise DataError(f"{row.origin}: {what}: leave these rows or the column out")


def row_tools(row: Row) -> list[dict[str, Any]]:
    """Return the JSON schemas of functions that a row shows the model, of `tools` or of another tool's column.

    Raises DataError for a column `tools` of anything else.
    """
    name = first_column(row.values, "tools")
    schemas = _read_schemas(row.values[name]) if name else []
    if schemas is None and name == "tools":
        raise DataError(f"{row.origin}: column 'tools' must be {_SCHEMAS}")
    return schemas or []


def system_text(row: Row) -> str:
    """Return the text of the row's column of a system message; empty if it has none."""
    name = first_column(row.values, "system")
    text = row.values[name] if name else ""
    return text if isinstance(text, str) and text.strip() else ""


def template_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments of the chat template. Raises DataError for what is no object nor its JSON text."""
    name = first_column(values, "template")
    arguments = values[name] if name else {}
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    if not isinstance(arguments, dict):
        raise DataError(f"column {name!r} must be an object such as {{enable_thinking: false}}")
    return arguments


def describe_columns(row: Row, section: DatasetSection, opening: str) -> tuple[list[str], list[str]]:
    """Return (columns read under another tool's name, ignored columns), each in words.

    opening: text of the chat's first message; empty where the row has no messages.
    """
    read = list[str]()
    ignored = list[str]()
    tools = first_column(row.values, "tools")
    if tools and tools != "tools":
        is_read = _read_schemas(row.values[tools]) is not None
        text = f"tools in column {tools!r}" if is_read else f"a column {tools!r}, which is not {_SCHEMAS}"
        (read if is_read else ignored).append(text)
    system = first_column(row.values, "system")
    if system and opening:
        if system_text(row) == opening:
            read.append(f"a system message in column {system!r}")
        else:
            ignored.append(f"a column {system!r} that is no text, or comes beside a system message")
    keys = {key.partition(".")[0] for key in (section.messages_key, section.prompt_key, section.answer_key)}
    for column in KNOWN_COLUMNS:
        if column.use == "ignored" and column.name not in keys and not is_empty(row.values.get(column.name)):
            ignored.append(f"a column {column.name!r} ({column.meaning})")
    return read, ignored


def first_column(values: Mapping[str, Any], use: str) -> str:
    """Return the first column of a use that is not empty; empty if there is none."""
    return next((name for name in columns_of(use) if not is_empty(values.get(name))), "")


def _parse(text: str) -> Any:
    """Return the value of JSON; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_schemas(tools: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of functions as chat templates take them; None if the value holds no schemas."""
    if isinstance(tools, str):
        tools = _parse(tools) if tools.strip() else []
    if not isinstance(tools, list):
        return None
    schemas = list[dict[str, Any]]()
    for tool in tools:
        schema = _parse(tool) if isinstance(tool, str) else tool
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        schemas.append({"type": "function", **schema} if "function" in schema else _wrap(schema))
    return schemas


def _wrap(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}
