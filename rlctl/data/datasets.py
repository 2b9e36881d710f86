"""Rows of a data set, from JSONL, Parquet or a hub dataset, each with the place it came from.

Whatever is wrong with a row is a `DataError` of one line that names file and line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.config.schema import DatasetSection

FILE_SUFFIXES = (".jsonl", ".parquet")


class DataError(ValueError):
    """Something is wrong with the data; one line for the user."""


@dataclass(frozen=True)
class Row:
    """One row: its columns, its number within the data set (from 0), and where it stands (`train.jsonl:3`)."""

    number: int
    origin: str
    values: dict[str, Any]


def load_rows(section: DatasetSection) -> list[Row]:
    """All rows of `section`, at most `limit`. `path` is a .jsonl or .parquet file, else a hub dataset.

    A hub dataset's configuration follows a colon (`openai/gsm8k:main`). Raises DataError.
    """
    if section.path is None:
        raise DataError("no data set: path is null")
    origins_and_values = islice(_read(section.path, section.split), section.limit)
    rows = [Row(number, origin, values) for number, (origin, values) in enumerate(origins_and_values)]
    if not rows:
        raise DataError(f"{section.path}: no rows")
    return rows


def _read(path: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if Path(path).suffix not in FILE_SUFFIXES:
        return _read_hub(path, split)
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    return _read_jsonl(path) if path.endswith(".jsonl") else _read_parquet(path)


def _read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", _json_object(line, f"{path}:{number}")


def _json_object(line: bytes, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}: not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8: {error.reason} (byte {error.start + 1})") from error
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a row must be a JSON object, not {type(value).__name__}")
    return value


def _read_parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}", row
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not Parquet: {str(error).splitlines()[0]}") from error


def _read_hub(path: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the hub's errors have no common class; every one ends the run with its line
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{path} is no .jsonl or .parquet file and no hub dataset: {reason[0]}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}[{split}]:{number}", row
