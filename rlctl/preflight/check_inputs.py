"""Checks of what a config names outside itself: data files, rewards, the run's directory. Nothing is imported or run.

megatron-core, which only backend megatron needs, is looked for too.
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
from rlctl.config.plugins import REWARDS, needs_answers
from rlctl.config.provenance import show_path
from rlctl.config.schema import DatasetSection, RunConfig, SftConfig
from rlctl.data.datasets import FILE_SUFFIXES, first_line
from rlctl.preflight.backend import Violation, Violations

# Bytes of a name in most file systems, less what is put before or after it.
_LONGEST_NAME = 200
# Linux takes 4,096.
_LONGEST_PATH = 3000


def check_data(config: RunConfig) -> Violations:
    """Find data files that cannot be used. Hub names and folders are not looked into."""
    data = config.data
    if data.train.path is None:
        yield Violation("data.train.path", "not set: a JSONL or Parquet file, or a hub dataset name")
    answered = isinstance(config, SftConfig) or needs_answers(config.rewards)
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        for where, key, what in _check_dataset(dataset, answered):
            yield Violation(f"data.{name}.{key}", what, where=where)


def check_validation(config: RunConfig) -> Violations:
    """Find several answers that would all be the same."""
    count = config.validation.num_generations
    if count > 1 and config.validation.temperature == 0:
        what = f"{count} greedy answers are all the same; set validation.temperature above 0, or 1 here"
        yield Violation("validation.num_generations", what, ("validation.temperature",))


def _check_dataset(dataset: DatasetSection, answered: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (where, key, what) for a file that cannot be used; where: empty for the config's own line.

    answered: rows need an answer, which a chat holds itself.
    """
    path = Path(dataset.path) if dataset.path is not None else None
    if path is None or not os.path.isfile(path):
        return
    if path.suffix not in FILE_SUFFIXES:
        yield "", "path", f"{show_path(path)} is no {' or '.join(FILE_SUFFIXES)} file"
        return
    try:
        parquet = path.suffix == ".parquet"
        line, columns = (1, _parquet_columns(path)) if parquet else first_line(str(path))
    except (OSError, ValueError) as error:
        what = str(error).removeprefix(str(path)).removeprefix(": ")
        yield "", "path", f"{show_path(path)}{what}" if what.startswith(":") else f"{show_path(path)}: {what}"
        return
    if columns is None:
        return
    where = f"{show_path(path)}:{line}"
    if dataset.messages_key in columns:
        return
    listed = f"; it has {', '.join([*columns][:8])}"
    if dataset.prompt_key not in columns:
        wanted = f"no column {dataset.prompt_key} or {dataset.messages_key}"
        yield where, "prompt_key", wanted + (did_you_mean(dataset.prompt_key, columns) or listed)
    if answered and dataset.answer_key not in columns:
        hint = did_you_mean(dataset.answer_key, columns) or listed
        yield where, "answer_key", f"no column {dataset.answer_key}{hint}"


def check_reward(reward: RewardSection) -> Iterator[tuple[str, str]]:
    """Yield (key, what) for a reward that cannot work."""
    if reward.name == "regex" and reward.pattern is None:
        yield "name", r"regex needs a pattern, for example 'answer is (\d+)'"
    elif reward.pattern is not None and reward.name != "regex":
        yield "pattern", f"only regex has a pattern, {reward.name} has none"
    elif reward.pattern is not None:
        try:
            groups = re.compile(reward.pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            yield "pattern", f"no regular expression: {error}"
        else:
            if groups == 0:
                advice = "put what is compared with the answer in brackets"
                yield "pattern", f"has no group: {advice}, not {shortened(reward.pattern)}"
    if what := missing_plugin(reward.name, REWARDS, "function"):
        yield "name", what


def check_run_name(config: RunConfig) -> Violations:
    """Find a name that is no folder name, or that another run has."""
    run = config.run
    if run.name is None:
        return
    folder = Path(run.dir) / str(run.name)
    if not re.fullmatch(r"\w[\w.+=-]*", str(run.name)):
        what = f"must be letters, digits and any of . _ - + =, not {shortened(repr(run.name))}"
    elif len(os.fsencode(run.name)) > _LONGEST_NAME:
        what = f"must be at most {_LONGEST_NAME} letters, since it names a folder, not {len(run.name)}"
    elif not os.path.exists(folder):
        return
    else:
        resume = f"continue it with --resume {quote(str(folder))}, or " * (folder / "config.yaml").is_file()
        what = f"{folder} exists: {resume}choose another name"
    yield Violation("run.name", what)


def check_run_folder(config: RunConfig) -> Violations:
    """Find a folder that cannot be made or written to."""
    if what := _unwritable(config.run.dir):
        yield Violation("run.dir", what)


def _unwritable(directory: str) -> str:
    """Return why a folder cannot be made or written to; empty if it can."""
    if directory.startswith("~"):
        return f"{shortened(directory.partition('/')[0])} is no user of this machine"
    folder = Path(os.path.abspath(directory))
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        return f"is {len(os.fsencode(folder)):,} letters long: at most {_LONGEST_PATH:,} leave room for a run's files"
    while not os.path.lexists(folder) and folder != folder.parent:
        if len(os.fsencode(folder.name)) > _LONGEST_NAME:
            return f"{shortened(folder.name)} is longer than a folder's name can be, {_LONGEST_NAME} letters"
        folder = folder.parent
    if not os.path.isdir(folder):
        return f"{show_path(folder)} is no folder: choose another one"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{show_path(folder)} cannot be written to by this user: choose another folder"
    return ""


def missing_megatron() -> str | None:
    """Return what to type if megatron-core is not installed. To look for more than its namespace would import it."""
    return None if find_spec("megatron") else "megatron needs megatron-core: pip install 'rlctl[megatron]'"


def _parquet_columns(path: Path) -> list[str] | None:
    """Return the columns of a Parquet file; None where they cannot be read here. Raises ValueError: no row."""
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
    file: Path | None = Path(module)
    if not module.endswith(".py"):
        names = module.split(".")
        folders = [Path.cwd(), *map(Path, sys.path)] if all(name.isidentifier() for name in names) else []
        forms = (f"{'/'.join(names)}.py", f"{'/'.join(names)}/__init__.py")
        files = (folder / form for folder in folders for form in forms)
        file = next((each for each in files if os.path.isfile(each)), None)
    if file is None:
        return f"no module {shortened(module)} beside the recipe, in the current directory or on the Python path"
    try:
        defined = _defined_names(file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{show_path(file)} is not Python: {error}"
    if attribute in defined:
        return ""
    return f"{show_path(file)} defines no {attribute or kind}{did_you_mean(attribute, defined)}"


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
