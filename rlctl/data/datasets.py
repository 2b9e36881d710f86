"""Reading of a data set's rows from files, a folder of the datasets library, a hub or a generator.

Each row has its place of origin, such as `train.jsonl:3`. An error in a row is a `DataError` of one line with this
place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import first_line
from rlctl.config.plugins import ROW_GENERATORS
from rlctl.data.files import (
    ARROW_BATCH,
    FILE_SUFFIXES,
    DataError,
    Read,
    arrow_rows,
    files_of,
    is_file_of_rows,
    read_file,
)
from rlctl.data.nested_columns import chat_columns
from rlctl.utils.user_code import load_object


@dataclass(frozen=True)
class Row:
    """One row of a data set."""

    # Index within the data set, from 0.
    number: int
    # File and line, for example `train.jsonl:3`.
    origin: str
    # Column -> value.
    values: dict[str, Any]
    # Key of data.train.sources; empty if the run has no sources.
    source: str = ""


class RowGenerator(Protocol):
    """Library that generates rows from arguments, such as a seed. In a path NAME:DATASET, NAME is the library's."""

    def problems(self, dataset: str, args: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return (key below the data set's section, problem) of each mistake, without generating rows."""

    def seeds(self, dataset: str, args: Mapping[str, Any]) -> range:
        """Return the seed of each row. Two data sets of the same name share the rows whose seeds they share."""

    def read(self, dataset: str, args: Mapping[str, Any], limit: int | None) -> Read:
        """Yield (origin, columns) of at most `limit` rows. Equal arguments give equal rows. Raises DataError."""


def generator_of(path: str | Sequence[str] | None) -> tuple[RowGenerator, str] | None:
    """Return the generator and the data set's name of a path NAME:DATASET; None for a path without a generator."""
    name, _, dataset = path.partition(":") if isinstance(path, str) else ("", "", "")
    return (load_object(ROW_GENERATORS[name])(), dataset) if name in ROW_GENERATORS else None


def load_rows(section: DatasetSection) -> list[Row]:
    """Return the rows of a section of the config, at most `section.limit`. Raises DataError.

    `path` is one or several files, a folder saved by the datasets library, a generator and its data set
    (`reasoning_gym:chain_sum`), or else a hub dataset, with its configuration after a colon (`openai/gsm8k:main`).
    """
    if section.path is None:
        raise DataError("no data set: path is null")
    limited = islice(_read_dataset(section), section.limit)
    rows = [Row(number, origin, columns) for number, (origin, columns) in enumerate(limited)]
    if not rows:
        split = f" in split {section.split}" if "[" in section.split else ""
        raise DataError(f"{path_text(section.path)}: no rows{split}")
    return rows


def path_text(path: str | Sequence[str] | None) -> str:
    """Return the path of a data set as a person reads it."""
    return path if isinstance(path, str) else ", ".join(path or ["null"])


def _read_dataset(section: DatasetSection) -> Read:
    """Yield (origin, columns) of each row of the section's split, which may be a slice (`train[:90%]`).

    A data set without splits has the split `train` only.
    """
    path = section.path or ()
    split = section.split
    files = files_of(path)
    if not files:
        raise DataError(f"{path_text(path)}: no file has such a name")
    if generated := generator_of(path):
        generator, dataset = generated
        # A slice of the split is one of all rows, so they are generated without the limit.
        read = generator.read(dataset, section.args, section.limit if split == "train" else None)
    elif len(files) == 1 and isinstance(path, str) and not is_file_of_rows(files[0]):
        return _read_saved(section, path) if _is_saved(Path(path)) else _read_hub(section, path)
    else:
        read = chain.from_iterable(read_file(file, chat_columns(section)) for file in files)
    if split == "train":
        return read
    rows = list(read)
    allowed = "it has the split train alone, whole or as train[:90%], train[-10%:], train[10:20]"
    numbers = _row_numbers(split, {"train": len(rows)}, path_text(path), allowed)
    return (rows[number] for number in numbers["train"])


def _row_numbers(split: str, sizes: dict[str, int], path: str, allowed: str) -> dict[str, list[int]]:
    """Return for each whole split the indices of the rows that the expression `split` selects.

    sizes: number of rows of each whole split. allowed: text that lists the existing splits, for an error.
    """
    from datasets import ReadInstruction

    numbers: dict[str, list[int]] = {name: [] for name in sizes}
    try:
        for part in ReadInstruction.from_spec(split).to_absolute(sizes):
            numbers[part.splitname] += range(part.from_, part.to)
    except (AssertionError, ValueError) as error:
        raise DataError(f"{path}: split {split}: {first_line(error)} ({allowed})") from error
    return numbers


def _is_saved(folder: Path) -> bool:
    """Return True for a folder that `save_to_disk` wrote, with one data set or with one for each split."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _read_saved(section: DatasetSection, path: str) -> Read:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # The library's errors have no common class.
        raise DataError(f"{path}: not what save_to_disk writes: {first_line(error)}") from error
    parts = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    allowed = f"it has {', '.join(parts)}, each whole or as train[:90%]"
    sizes = {name: len(rows) for name, rows in parts.items()}
    row_numbers = _row_numbers(section.split, sizes, path, allowed)
    selected = ((name, parts[name].select(numbers)) for name, numbers in row_numbers.items() if numbers)
    return _read_loaded(selected, section, path)


def _read_loaded(parts: Iterator[tuple[str, Any]], section: DatasetSection, path: str) -> Read:
    """Yield the rows of loaded data sets. parts: (split, data set) pairs. Pictures and sounds stay bytes."""
    columns = chat_columns(section)
    for name, rows in parts:
        first = 1
        for table in rows.with_format("arrow").iter(ARROW_BATCH):
            yield from arrow_rows(table, f"{path}[{name}]", first, columns)
            first += table.num_rows


def _read_hub(section: DatasetSection, path: str) -> Read:
    import datasets

    split = section.split
    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # The hub's errors have no common class. Each ends the run with its line.
        files = ", ".join(FILE_SUFFIXES)
        raise DataError(f"{path} is no file ({files}) and no hub dataset: {first_line(error)}") from error
    return _read_loaded(iter([(split, rows)]), section, path)
