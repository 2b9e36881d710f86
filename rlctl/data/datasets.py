"""Rows of a data set, read from JSONL, Parquet or a hub dataset, each with its place of origin.

Anything wrong with a row is a `DataError` of one line that names file and line.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.config.schema import DatasetSection

FILE_SUFFIXES = (".jsonl", ".parquet")
# Levels of nesting in a row. Rows are pickled and written as JSON on their way through a run; both recurse.
MAX_DEPTH = 100
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Read = Iterator[tuple[str, dict[str, Any]]]


class DataError(ValueError):
    """Something wrong with the data; one line for the user."""


@dataclass(frozen=True)
class Row:
    """One row of a data set."""

    # Index within the data set, from 0.
    number: int
    # `train.jsonl:3`
    origin: str
    # Column -> value.
    values: dict[str, Any]


def load_rows(section: DatasetSection) -> list[Row]:
    """Return the rows of `section`, at most `limit`. `path` is a .jsonl or .parquet file, else a hub dataset.

    A hub dataset's configuration follows a colon (`openai/gsm8k:main`). Raises DataError.
    """
    if section.path is None:
        raise DataError("no data set: path is null")
    origins_and_values = islice(_read(section.path, section.split), section.limit)
    rows = [Row(number, *each) for number, each in enumerate(origins_and_values)]
    if not rows:
        raise DataError(f"{section.path}: no rows" + f" in split {section.split}" * ("[" in section.split))
    return rows


def first_line(path: str) -> tuple[int, dict[str, Any]]:
    """Return line number and columns of the first row of a JSONL file. Raises DataError."""
    for origin, values in _read_jsonl(path):
        return int(origin.rpartition(":")[2]), values
    raise DataError(f"{path}: is empty")


def _read(path: str, split: str) -> Read:
    """Yield (origin, columns). A file is its split train; slices such as `train[:90%]` follow the datasets library."""
    if Path(path).suffix not in FILE_SUFFIXES:
        return _read_hub(path, split)
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    read = _read_jsonl(path) if path.endswith(".jsonl") else _read_parquet(path)
    if split == "train":
        return read
    from datasets import ReadInstruction

    rows = list(read)
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (AssertionError, ValueError) as error:
        needed = "a file has the split train alone, whole or as train[:90%], train[-10%:], train[10:20]"
        raise DataError(f"{path}: split {split}: {_reason(error)} ({needed})") from error
    return (row for part in parts for row in rows[part.from_ : part.to])


def _read_jsonl(path: str) -> Read:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", _json_object(line, f"{path}:{number}")


def _json_object(line: bytes, origin: str) -> dict[str, Any]:
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}: not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8: {error.reason} (byte {error.start + 1})") from error
    except RecursionError as error:
        raise DataError(f"{origin}: {_TOO_DEEP}") from error
    except ValueError as error:
        digits = f"a number of more than {sys.get_int_max_str_digits():,} digits: write it as text"
        raise DataError(f"{origin}: {digits}") from error
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a row must be a JSON object, not {type(value).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise DataError(f"{origin}: {_TOO_DEEP}")
    # Half of a surrogate pair: no tokenizer takes it, nor can it be written as UTF-8.
    for name, column in value.items() if _SURROGATE.search(text) else ():
        try:
            json.dumps([name, column], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = rf"\u{ord(error.object[error.start]):04x}"
            what = f"column {name!a} has the lone surrogate {half}, half of a character: mend or remove it"
            raise DataError(f"{origin}: {what}") from error
    return value


_TOO_DEEP = f"nested too deep: a row may have {MAX_DEPTH} levels; write what is below as text"


def _is_deep(value: Any) -> bool:
    """Return True above MAX_DEPTH levels. It goes level by level, since recursion is what deep values break."""
    level = [value]
    for _ in range(MAX_DEPTH):
        holders = (each for each in level if isinstance(each, dict | list))
        level = [child for each in holders for child in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def _read_parquet(path: str) -> Read:
    import pyarrow
    import pyarrow.parquet

    broken = (pyarrow.ArrowException, OSError)
    try:
        batches = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True).iter_batches()
    except broken as error:
        raise DataError(f"{path}: not Parquet: {_reason(error)}") from error
    number = 1
    while True:
        try:
            batch = next(batches, None)
        except broken as error:
            raise DataError(f"{path}:{number}: rows from this one on cannot be read: {_reason(error)}") from error
        if batch is None:
            return
        for row in _arrow_rows(batch, path, number):
            yield f"{path}:{number}", row
            number += 1


def _arrow_rows(batch: Any, path: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as Python values; float32 as the shortest equal number: 0.1, not 0.1000000014..."""
    import numpy as np

    narrow = [field.name for field in batch.schema if str(field.type) in ("float", "halffloat")]
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # Text that is no UTF-8, times that Python does not have.
        rows = (_arrow_row(batch, index, f"{path}:{first + index}") for index in range(batch.num_rows))
    for row in rows:
        for name in narrow:
            if row[name] is not None:
                row[name] = float(str(np.float32(row[name])))
        yield row


def _arrow_row(batch: Any, index: int, origin: str) -> dict[str, Any]:
    try:
        return dict(batch.slice(index, 1).to_pylist()[0])
    except (ValueError, OverflowError) as error:
        raise DataError(f"{origin}: cannot be read: {_reason(error)}") from error


def _read_hub(path: str, split: str) -> Read:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the hub's errors have no common class; every one ends the run with its line
        raise DataError(f"{path} is no .jsonl or .parquet file and no hub dataset: {_reason(error)}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}[{split}]:{number}", row


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
