"""Reading of rows from files: JSON lines (also gzipped), JSON, CSV, Parquet. Errors are `DataError`s with a place."""

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from os.path import isfile
from typing import Any

from rlctl.config.errors import UserError, first_line

# Most levels of nesting in a row. A run pickles rows and writes them as JSON, and both recurse.
MAX_DEPTH = 100
# Number of Arrow rows that are read at a time.
ARROW_BATCH = 4096
# Arrow types whose values may differ from the author's values.
_JSON_TYPE = "arrow.json"
_NESTED = re.compile(rf"struct<|map<|{re.escape(_JSON_TYPE)}")
# Longest cell of a CSV file, in characters.
_LONGEST_CELL = 1 << 30
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

# (place of the row, its columns)
Read = Iterator[tuple[str, dict[str, Any]]]


class DataError(UserError):
    """An error in the data. The text is one line for the user."""


def is_file_of_rows(path: str) -> bool:
    """Return True if a file's name ends like that of a file of rows, for example in .jsonl."""
    return path.endswith(FILE_SUFFIXES)


def files_of(path: str | Sequence[str]) -> list[str]:
    """Return the files that `path` names: a file, a pattern such as `part-*.jsonl`, or a list of both.

    A pattern's files come in the order of their names. A name that is no pattern, such as a hub data set, is returned
    unchanged.
    """
    files: list[str] = []
    for name in [path] if isinstance(path, str) else path:
        is_pattern = has_magic(name) and not isfile(name)
        files += sorted(glob(name, recursive=True)) if is_pattern else [name]
    return files


def read_file(path: str, chat_columns: Collection[str] = ()) -> Read:
    """Yield (place, columns) of each row of a file. chat_columns: see `arrow_rows`. Raises DataError."""
    if not isfile(path):
        raise DataError(f"{path}: no such file")
    suffix = next((suffix for suffix in FILE_SUFFIXES if path.endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path}: must be a file in {', '.join(FILE_SUFFIXES)}")
    return _read_parquet(path, chat_columns) if suffix == _PARQUET else _READERS[suffix](path)


def first_row(path: str) -> tuple[str, dict[str, Any]]:
    """Return (place, columns) of the first row of a file. Raises DataError."""
    row = next(read_file(path), None)
    if row is None:
        raise DataError(f"{path}: is empty")
    return row


def _read_jsonl(path: str) -> Read:
    with open(path, "rb") as lines:
        yield from _json_lines(path, lines)


def _read_gzip(path: str) -> Read:
    try:
        with gzip.open(path, "rb") as lines:
            yield from _json_lines(path, lines)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not gzip, or not whole: {first_line(error)}") from error


def _json_lines(path: str, lines: Any) -> Read:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value, text = _json_value(line, f"{path}:{number}")
                yield f"{path}:{number}", _checked_row(value, text, f"{path}:{number}")
            except DataError as error:
                if number == 1 and line.lstrip().startswith(b"["):
                    raise DataError(f"{error}; a file with a list of rows is named .json") from error
                raise


def _read_json(path: str) -> Read:
    with open(path, "rb") as file:
        rows, text = _json_value(file.read(), path)
    if not isinstance(rows, list):
        kind = "an object" if isinstance(rows, dict) else f"a {type(rows).__name__}"
        raise DataError(f"{path}: must be a list of rows, not {kind}; a file with a row a line is named .jsonl")
    for number, row in enumerate(rows, 1):
        yield f"{path}[{number}]", _checked_row(row, text, f"{path}[{number}]")


def _json_value(data: bytes, origin: str) -> tuple[Any, str]:
    """Return the value and the text of JSON in bytes. Raises DataError."""
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        return json.loads(text), text
    except json.JSONDecodeError as error:
        hint = "; a file with a row a line is named .jsonl" if error.msg == "Extra data" and error.lineno > 1 else ""
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{origin}: not JSON: {error.msg} ({line}column {error.colno}){hint}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8: {error.reason} (byte {error.start + 1})") from error
    except RecursionError as error:
        raise DataError(f"{origin}: {_TOO_DEEP}") from error
    except ValueError as error:
        digits = f"a number of more than {sys.get_int_max_str_digits():,} digits: write it as text"
        raise DataError(f"{origin}: {digits}") from error


def _checked_row(value: Any, text: str, origin: str) -> dict[str, Any]:
    """Return a row after checks that it can be pickled, tokenized and written as UTF-8. text: JSON that contains it.

    Raises DataError.
    """
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a row must be a JSON object, not {type(value).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise DataError(f"{origin}: {_TOO_DEEP}")
    # A lone surrogate: no tokenizer takes it, and UTF-8 cannot encode it.
    for name, column in value.items() if _SURROGATE.search(text) else ():
        try:
            json.dumps([name, column], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = rf"\u{ord(error.object[error.start]):04x}"
            problem = f"column {name!a} has the lone surrogate {half}, half of a character: mend or remove it"
            raise DataError(f"{origin}: {problem}") from error
    return value


_TOO_DEEP = f"nested too deep: a row may have {MAX_DEPTH} levels; write what is below as text"


def _is_deep(value: Any) -> bool:
    """Return True if a value has more than MAX_DEPTH levels. Without recursion, which a deep value would break."""
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for parent in level:
            if isinstance(parent, dict):
                children += parent.values()
            elif isinstance(parent, list):
                children += parent
        level = children
    return any(isinstance(child, dict | list) for child in level)


def _read_csv(path: str) -> Read:
    """Yield the rows of a CSV file, whose first line names the columns. An empty cell is null; other cells are text."""
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            columns = next(lines, [])
            if len(set(columns)) < len(columns):
                raise DataError(f"{path}:1: two columns have one name: {', '.join(columns)}")
            for cells in lines:
                origin = f"{path}:{lines.line_num}"
                if cells and len(cells) != len(columns):
                    raise DataError(f"{origin}: {len(cells)} cells, and the first line names {len(columns)} columns")
                if cells:
                    yield origin, {name: cell or None for name, cell in zip(columns, cells)}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not CSV in UTF-8: {first_line(error)}") from error


def _read_parquet(path: str, chat_columns: Collection[str]) -> Read:
    import pyarrow
    import pyarrow.parquet

    broken = (pyarrow.ArrowException, OSError)
    try:
        batches = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True).iter_batches(ARROW_BATCH)
    except broken as error:
        raise DataError(f"{path}: not Parquet: {first_line(error)}") from error
    number = 1
    while True:
        try:
            batch = next(batches, None)
        except broken as error:
            raise DataError(f"{path}:{number}: rows from this one on cannot be read: {first_line(error)}") from error
        if batch is None:
            return
        yield from arrow_rows(batch, path, number, chat_columns)
        number += batch.num_rows


def arrow_rows(batch: Any, path: str, first: int, chat_columns: Collection[str]) -> Read:
    """Yield (place, columns) of each row of an Arrow table. first: number of the table's first row. Raises DataError.

    Arrow gives all structs of a column the same keys, and fills missing ones with null. So in `chat_columns` (dotted
    names) a key of a struct with null is left out, at any depth. A column of JSON is decoded, and keeps its nulls,
    because its author wrote them. A float32 becomes the shortest equal number: 0.1, not 0.1000000014...
    """
    import numpy as np

    narrow = [field.name for field in batch.schema if str(field.type) in ("float", "halffloat")]
    nested = [field for field in batch.schema if _NESTED.search(str(field.type))]
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):  # Text not in UTF-8, times beyond Python's, equal keys of a map.
        # Row by row, so that the error names the row.
        rows = (_arrow_row(batch, index, f"{path}:{first + index}") for index in range(batch.num_rows))
    for number, row in enumerate(rows, first):
        for name in narrow:
            if row[name] is not None:
                row[name] = float(str(np.float32(row[name])))
        for field in nested:
            column = ArrowColumn(f"{path}:{number}", chat_columns)
            row[field.name] = column.as_written(row[field.name], field.type, field.name)
        yield f"{path}:{number}", row


def _arrow_row(batch: Any, index: int, origin: str) -> dict[str, Any]:
    try:
        return dict(batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")[0])
    except (ValueError, OverflowError, KeyError) as error:
        raise DataError(f"{origin}: cannot be read: {first_line(error)}") from error


@dataclass(frozen=True)
class ArrowColumn:
    """Converter of one row's value in an Arrow column with structs or JSON."""

    # Place of the row.
    origin: str
    chat_columns: Collection[str]

    def as_written(self, value: Any, kind: Any, name: str, is_chat: bool = False) -> Any:
        """Return a value of the Arrow type `kind` as its author wrote it. Raises DataError for bad JSON.

        name: dotted name of the value's column. is_chat: the value is within a chat column.
        """
        is_chat = is_chat or name in self.chat_columns
        if getattr(kind, "extension_name", "") == _JSON_TYPE and isinstance(value, str):
            decoded, text = _json_value(value.encode(), self.origin)
            return _checked_row({name: decoded}, text, self.origin)[name]
        if isinstance(value, list) and hasattr(kind, "value_field"):  # a list
            inner = kind.value_type
            return [self.as_written(item, inner, f"{name}.{index}", is_chat) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if hasattr(kind, "item_type"):  # a map, whose author chose each key
            return {key: self.as_written(item, kind.item_type, f"{name}.{key}", is_chat) for key, item in value.items()}
        written = {}
        for field in kind:  # a struct
            item = value[field.name]
            if item is not None or not is_chat:
                written[field.name] = self.as_written(item, field.type, f"{name}.{field.name}", is_chat)
        return written


_PARQUET = ".parquet"
_READERS: dict[str, Callable[[str], Read]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_gzip,
    ".json": _read_json,
    ".csv": _read_csv,
}
FILE_SUFFIXES = (*_READERS, _PARQUET)
