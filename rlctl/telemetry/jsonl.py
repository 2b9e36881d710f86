"""JSON lines on disk: a writer that survives a full disk, and readers that skip a half-written line.

A record is one whole line, so a file can be read at any time while a run writes it.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# Fields that readers rely on: texts, and numbers.
_TEXTS = ("kind", "status")
_NUMBERS = ("time", "step", "start_step", "num_steps", "seconds")
_MOST = 1e18
# `last_record` searches this many bytes at the end of a file.
_TAIL_BYTES = 1 << 16


class JsonlWriter:
    """Writer of records, one line each. Readers see a record as soon as `write` returns. Thread-safe; never raises.

    A record whose write fails (full disk, lost mount) is lost and counted. The first failure prints a warning on
    stderr. Later records are written if the disk allows it again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        # Number of records that could not be written.
        self.num_lost = 0
        # True if the file ends with an unfinished line, which the next write ends first.
        self._has_torn_line = _ends_mid_line(path)

    def write(self, record: Record) -> None:
        # errors="replace", because a message from outside may have half a surrogate pair, which UTF-8 cannot encode.
        line = json.dumps(record, default=str, ensure_ascii=False).encode(errors="replace") + b"\n"
        with self._lock:
            try:
                self._append(b"\n" + line if self._has_torn_line else line)
                self._has_torn_line = False
            except OSError as error:
                self._has_torn_line = True
                self.num_lost += 1
                if self.num_lost == 1:
                    print(f"warning: cannot write {self._path}: {error.strerror}; the run goes on", file=sys.stderr)

    def _append(self, data: bytes) -> None:
        """Append bytes to the file. Raises OSError."""
        # Open the file for each write: a resume replaces it (truncate_metrics), and the old file must not get records.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)


class Tail:
    """Reader of the records appended since the last `read`; starts over if the file was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        # Number of complete lines read so far that are not a JSON object.
        self.damaged = 0

    @property
    def name(self) -> str:
        """Name of the file."""
        return self._path.name

    def read(self) -> list[Record]:
        """Return the new complete records, in file order. An unfinished last line is left to a later call."""
        try:
            status = self._path.stat()
        except OSError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode = status.st_ino
            self._offset = 0
            self.damaged = 0
        if status.st_size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = list(_parse(complete))
        self.damaged += _count_lines(complete) - len(records)
        return records


def read_records(path: Path) -> list[Record]:
    """Return all complete records of a file; an empty list if the file does not exist."""
    return Tail(path).read()


def last_record(path: Path) -> Record:
    """Return the last complete record of a file; an empty one if there is none within the last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return {}
    records = list(_parse(data[: data.rfind(b"\n") + 1]))
    return records[-1] if records else {}


def damaged_lines(path: Path) -> int:
    """Return the number of complete lines of a file that are not a JSON object; 0 if the file does not exist."""
    try:
        data = path.read_bytes()
    except OSError:
        return 0
    complete = data[: data.rfind(b"\n") + 1]
    return _count_lines(complete) - sum(1 for _ in _parse(complete))


def is_sound(record: Record, keys: Iterable[str] = ()) -> bool:
    """Return True if a record has all of `keys`, and the fields that readers rely on have the right type.

    Every number must be finite and below 1e18, as all counts and times are.
    """
    if any(key not in record for key in keys):
        return False
    has_texts = all(isinstance(record.get(key, ""), str) for key in _TEXTS)
    has_numbers = all(_is_number(record[key]) for key in _NUMBERS if key in record)
    numbers = [value for value in record.values() if isinstance(value, (int, float))]
    return has_texts and has_numbers and all(map(_is_number, numbers))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _MOST


def _count_lines(data: bytes) -> int:
    """Return the number of lines that are not blank. A writer leaves a blank line after it ended a torn line."""
    return sum(1 for line in data.splitlines() if line.strip())


def _parse(data: bytes) -> Iterator[Record]:
    """Yield each line that is a JSON object."""
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _ends_mid_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
