"""Rows of a data set, from files, from a folder of the datasets library or from a hub, each with its place of origin.

Anything wrong with a row is a `DataError` of one line that names file and line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlctl.config.schema import DatasetSection
from rlctl.data.files import FILE_SUFFIXES, DataError, Read, files_of, is_file_of_rows, read_file, reason


@dataclass(frozen=True)
class Row:
    """One row of a data set."""

    # Index within the data set, from 0.
    number: int
    # `train.jsonl:3`
    origin: str
    # Column -> value.
    values: dict[str, Any]
    # Key of data.train.sources; empty if there are none.
    source: str = ""


def load_rows(section: DatasetSection) -> list[Row]:
    """Return the rows of `section`, at most `limit`. Raises DataError.

    `path` is one or several files, a folder that the datasets library saved, or else a hub dataset, whose configuration
    follows a colon (`openai/gsm8k:main`).
    """
    if section.path is None:
        raise DataError("no data set: path is null")
    name = shown(section.path)
    rows = [Row(number, *each) for number, each in enumerate(islice(_read(section.path, section.split), section.limit))]
    if not rows:
        raise DataError(f"{name}: no rows" + f" in split {section.split}" * ("[" in section.split))
    return rows


def shown(path: str | Sequence[str] | None) -> str:
    """Return the path of a data set as a person reads it."""
    return path if isinstance(path, str) else ", ".join(path or ["null"])


def _read(path: str | Sequence[str], split: str) -> Read:
    """Yield (origin, columns). Files are one split, train; slices such as `train[:90%]` follow the datasets library."""
    files = files_of(path)
    if not files:
        raise DataError(f"{shown(path)}: no file has such a name")
    if len(files) == 1 and isinstance(path, str) and not is_file_of_rows(files[0]):
        return _read_saved(path, split) if _is_saved(Path(path)) else _read_hub(path, split)
    read = chain.from_iterable(map(read_file, files))
    if split == "train":
        return read
    rows = list(read)
    needed = "a file has the split train alone, whole or as train[:90%], train[-10%:], train[10:20]"
    return (rows[index] for index in _rows_of(split, {"train": len(rows)}, shown(path), needed)["train"])


def _rows_of(split: str, sizes: dict[str, int], path: str, needed: str) -> dict[str, list[int]]:
    """Return the numbers of the rows of a split, by the split that they are of. sizes: rows of each split."""
    from datasets import ReadInstruction

    found: dict[str, list[int]] = {name: [] for name in sizes}
    try:
        for part in ReadInstruction.from_spec(split).to_absolute(sizes):
            found[part.splitname] += range(part.from_, part.to)
    except (AssertionError, ValueError) as error:
        raise DataError(f"{path}: split {split}: {reason(error)} ({needed})") from error
    return found


def _is_saved(folder: Path) -> bool:
    """Return True for a folder that `save_to_disk` wrote: of one data set, or of several by split."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _read_saved(path: str, split: str) -> Read:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # as below: its errors have no common class
        raise DataError(f"{path}: not what save_to_disk writes: {reason(error)}") from error
    parts = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    needed = f"it has {', '.join(parts)}, each whole or as train[:90%]"
    chosen = _rows_of(split, {name: len(rows) for name, rows in parts.items()}, path, needed)
    return _numbered(((name, parts[name].select(numbers)) for name, numbers in chosen.items() if numbers), path)


def _numbered(parts: Iterator[tuple[str, Any]], path: str) -> Read:
    for name, rows in parts:
        for number, row in enumerate(rows, 1):
            yield f"{path}[{name}]:{number}", row


def _read_hub(path: str, split: str) -> Read:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the hub's errors have no common class; every one ends the run with its line
        files = ", ".join(FILE_SUFFIXES)
        raise DataError(f"{path} is no file ({files}) and no hub dataset: {reason(error)}") from error
    return _numbered(iter([(split, rows)]), path)
