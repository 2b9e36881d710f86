"""What a config names outside itself: data files, rewards, the run's directory. Nothing is imported or run.

And whether megatron-core, which only backend megatron needs, is installed.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from rlctl.config.errors import did_you_mean, shortened
from rlctl.config.grpo_schema import RewardSection
from rlctl.config.plugins import REWARDS
from rlctl.config.provenance import show_path
from rlctl.config.schema import DatasetSection, RunSection
from rlctl.data.datasets import first_line

# Of most file systems, less what is put before or behind it.
_LONGEST_NAME = 200
# Linux takes 4,096.
_LONGEST_PATH = 3000
DATA_SUFFIXES = (".jsonl", ".parquet")


def check_dataset(dataset: DatasetSection, *, answered: bool) -> Iterator[tuple[str, str, str]]:
    """(where, key, what) for a file that cannot be used; `where` is empty when it is the config's own line.

    answered: rows need an answer, which a chat holds itself. Hub names and folders are not looked into.
    """
    path = Path(dataset.path) if dataset.path is not None else None
    if path is None or not os.path.isfile(path):
        return
    if path.suffix not in DATA_SUFFIXES:
        yield "", "path", f"{show_path(path)} is no {' or '.join(DATA_SUFFIXES)} file"
        return
    try:
        line, columns = _first_row(path)
    except (OSError, ValueError) as error:
        what = str(error).removeprefix(str(path)).removeprefix(": ")
        yield "", "path", f"{show_path(path)}{what}" if what.startswith(":") else f"{show_path(path)}: {what}"
        return
    if columns is None:
        return
    where = f"{show_path(path)}:{line}"
    if dataset.messages_key in columns:
        return
    if dataset.prompt_key not in columns:
        wanted = f"no column {dataset.prompt_key} or {dataset.messages_key}"
        yield where, "prompt_key", wanted + (did_you_mean(dataset.prompt_key, columns) or _listed(columns))
    if answered and dataset.answer_key not in columns:
        hint = did_you_mean(dataset.answer_key, columns) or _listed(columns)
        yield where, "answer_key", f"no column {dataset.answer_key}{hint}"


def check_reward(reward: RewardSection) -> Iterator[tuple[str, str]]:
    """(key, what) for a reward that cannot work."""
    if reward.name == "regex":
        yield from _check_pattern(reward.pattern)
    elif reward.pattern is not None:
        yield "pattern", f"only regex has a pattern, {reward.name} has none"
    if what := missing_plugin(reward.name, REWARDS, "function"):
        yield "name", what


def check_run_name(run: RunSection) -> Iterator[str]:
    """A name that is no folder name, or that another run has."""
    if run.name is None:
        return
    if not re.fullmatch(r"\w[\w.+=-]*", str(run.name)):
        yield f"must be letters, digits and any of . _ - + =, not {shortened(repr(run.name))}"
        return
    folder = Path(run.dir) / run.name
    if len(os.fsencode(run.name)) > _LONGEST_NAME:
        yield f"must be at most {_LONGEST_NAME} letters, since it names a folder, not {len(run.name)}"
    elif os.path.exists(folder):
        resumable = (folder / "config.yaml").is_file()
        yield (
            f"{folder} exists: "
            + (f"continue it with --resume {quote(str(folder))}, or " * resumable)
            + "choose another name"
        )


def check_run_folder(run: RunSection) -> Iterator[str]:
    """A folder that cannot be made or written to."""
    if run.dir.startswith("~"):
        yield f"{shortened(run.dir.partition('/')[0])} is no user of this machine"
        return
    folder = Path(os.path.abspath(run.dir))
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        yield f"is {len(os.fsencode(folder)):,} letters long: at most {_LONGEST_PATH:,} leave room for a run's files"
        return
    while not os.path.lexists(folder) and folder != folder.parent:
        if len(os.fsencode(folder.name)) > _LONGEST_NAME:
            yield f"{shortened(folder.name)} is longer than a folder's name can be, {_LONGEST_NAME} letters"
            return
        folder = folder.parent
    if not os.path.isdir(folder):
        yield f"{show_path(folder)} is no folder: choose another one"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"{show_path(folder)} cannot be written to by this user: choose another folder"


def missing_megatron() -> str | None:
    """What to type when megatron-core is not installed. Its namespace is looked for: finding its core would import."""
    return None if find_spec("megatron") else "megatron needs megatron-core: pip install 'rlctl[megatron]'"


def _check_pattern(pattern: str | None) -> Iterator[tuple[str, str]]:
    if pattern is None:
        yield "name", r"regex needs a pattern, for example 'answer is (\d+)'"
        return
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield "pattern", f"no regular expression: {error}"
        return
    if groups == 0:
        advice = "put what is compared with the answer in brackets"
        yield "pattern", f"has no group: {advice}, not {shortened(pattern)}"


def _first_row(path: Path) -> tuple[int, list[str] | None]:
    """(line, column names) of the first row; names None when they cannot be read here. Raises ValueError: no row."""
    if path.suffix == ".parquet":
        return 1, _parquet_columns(path)
    number, row = first_line(str(path))
    return number, list(row)


def _parquet_columns(path: Path) -> list[str] | None:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:  # It comes with the engines; without them nothing can run anyway.
        return None
    try:
        file = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ValueError(f"is no Parquet file: {error}") from error
    if file.metadata.num_rows == 0:
        raise ValueError("is empty")
    return list(file.schema_arrow.names)


def missing_plugin(name: str, known: Iterable[str], kind: str) -> str:
    """Return what is wrong with a name that must be `known`, `module:object` or `file.py:object`; empty if nothing.

    Judged by the source alone. kind: what the object is, a function or a Class.
    """
    if name in known:
        return ""
    if ":" not in name:
        return f"must be {', '.join(known)} or module:{kind}, not {name}{did_you_mean(name, known)}"
    module, _, attribute = name.rpartition(":")
    file = Path(module) if module.endswith(".py") else _module_file(module)
    if file is None:
        return f"no module {shortened(module)} beside the recipe, in the current directory or on the Python path"
    try:
        names = _defined_names(file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{show_path(file)} is not Python: {error}"
    if attribute in names:
        return ""
    return f"{show_path(file)} defines no {attribute or kind}{did_you_mean(attribute, names)}"


def _module_file(module: str) -> Path | None:
    names = module.split(".")
    if not all(name.isidentifier() for name in names):
        return None
    relative = Path(*names)
    folders = [Path.cwd(), *map(Path, sys.path)]
    forms = (relative.with_suffix(".py"), relative / "__init__.py")
    return next((folder / form for folder in folders for form in forms if os.path.isfile(folder / form)), None)


def _defined_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _listed(columns: list[str]) -> str:
    return f"; it has {', '.join(columns[:8])}"
