"""Reader for JSON files of model and adapter folders. Its errors name the file, the key and the allowed values."""

import json
import math
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, shorten

# Most levels of nesting. Published files have up to six.
_MAX_LEVELS = 50


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return parse_object(text, str(file))


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the object in a JSON text. source: its file, for messages. Raises ModelError."""
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise ModelError(f"{source} has values within values; allowed: at most {_MAX_LEVELS} levels") from error
    except ValueError as error:
        raise ModelError(f"{source} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{source} holds {_as_json(parsed)}; needed: a JSON object")
    level: list[Any] = [parsed]
    for _ in range(_MAX_LEVELS):
        deeper = list[Any]()
        for value in level:
            if isinstance(value, dict):
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
        level = deeper
    if level:
        raise ModelError(f"{source} has values within values; allowed: at most {_MAX_LEVELS} levels")
    return parsed


def whole_number(value: Any, place: str, low: int, high: int) -> int:
    """Return `value` if it is a whole number from `low` to `high`. place: file and key. Raises ModelError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"{place} is {_as_json(value)}; allowed: a whole number from {low:,} to {high:,}")
    return value


def real_number(value: Any, place: str, low: float, high: float) -> float:
    """Return `value` if it is a number from `low` to `high`. place: file and key. Raises ModelError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelError(f"{place} is {_as_json(value)}; allowed: a number from {low:g} to {high:,g}")
    assert math.isfinite(value)
    return float(value)


def _as_json(value: Any) -> str:
    """Return a value as JSON, shortened to 60 letters."""
    return shorten(json.dumps(value), 60)
