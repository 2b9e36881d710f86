"""Checks of a config's names outside itself: data files, rewards, the run's directory. Nothing is imported or run.

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

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import ConfigError, Problem, did_you_mean, shorten
from rlctl.config.grpo_schema import RewardSection
from rlctl.config.plugins import REWARDS
from rlctl.config.provenance import show_path
from rlctl.config.schema import RunConfig
from rlctl.data.datasets import generator_of, path_text
from rlctl.data.files import FILE_SUFFIXES, DataError, files_of, first_row, is_file_of_rows
from rlctl.data.nested_columns import convention, has_column
from rlctl.data.reasoning_gym import missing_library
from rlctl.preflight.backend import Violation, Violations

# Bytes of a name in most file systems, less the text added at its ends.
_LONGEST_NAME = 200


def check_data(config: RunConfig) -> Violations:
    """Find data files that cannot be used. Hub names and folders are not looked into."""
    data = config.data
    if data.train.path is None and not data.train.sources:
        yield Violation("data.train.path", "not set: a file (.jsonl, .json, .csv, .parquet), or a hub dataset name")
    if data.train.path is not None and data.train.sources:
        what = "data.train.path names a data set, and these name others: set path to null or sources to {}"
        yield Violation("data.train.sources", what, ("data.train.path",))
    asked, answered = config.needs_prompts, config.needs_answers
    sources = {f"train.sources.{name}": section for name, section in data.train.sources.items()}
    for name, dataset in {"train": data.train, "validation": data.validation, **sources}.items():
        for where, key, what in _check_dataset(dataset, asked, answered, f"data.{name}"):
            yield Violation(f"data.{name}.{key}", what, where=where)
    if data.validation.path is not None and data.validation.fraction is not None:
        what = "holds rows of data.train out, and data.validation.path names others: set one of them to null"
        yield Violation("data.validation.fraction", what, ("data.validation.path",))


def check_validation(config: RunConfig) -> Violations:
    """Find several answers that would all be the same."""
    count = config.validation.num_generations
    if count > 1 and config.validation.temperature == 0:
        what = f"{count} greedy answers are all the same; set validation.temperature above 0, or 1 here"
        yield Violation("validation.num_generations", what, ("validation.temperature",))


def _check_dataset(dataset: DatasetSection, asked: bool, answered: bool, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield (where, key, problem) for unusable files, by the first row of the first file; where: empty for the config's
    own line.

    asked: rows need a prompt. answered: rows need an answer, which a chat holds itself. key: of the section.
    """
    files = [each for each in files_of(dataset.path or []) if os.path.isfile(each)]
    for file in files:
        if not is_file_of_rows(file):
            yield (
                "",
                "path",
                f"{show_path(Path(file))} is no {', '.join(FILE_SUFFIXES[:-1])} or {FILE_SUFFIXES[-1]} file",
            )
            return
    if not files or (files[0].endswith(".parquet") and find_spec("pyarrow") is None):
        return  # It comes with the engines; without them nothing can run anyway.
    path = files[0]
    try:
        place, row = first_row(path)
    except (OSError, DataError) as error:
        what = str(error).removeprefix(path).removeprefix(": ")
        yield "", "path", f"{show_path(Path(path))}{what}" if what[:1] in ":[" else f"{show_path(Path(path))}: {what}"
        return
    where = f"{show_path(Path(path))}{place.removeprefix(path)}"
    if has_column(row, dataset.messages_key):
        return
    remedy, listed = convention(row, key), f"; it has {', '.join([*row][:8])}"
    if asked and not has_column(row, dataset.prompt_key):
        wanted = f"no column {dataset.prompt_key} or {dataset.messages_key}"
        yield where, "prompt_key", wanted + (remedy or did_you_mean(dataset.prompt_key, row) or listed)
        # It tells both keys.
        answered = answered and not remedy
    if answered and not has_column(row, dataset.answer_key):
        hint = remedy or did_you_mean(dataset.answer_key, row) or listed
        yield where, "answer_key", f"no column {dataset.answer_key}{hint}"


def check_reward(reward: RewardSection) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for a reward that cannot work."""
    if reward.name == "regex" and reward.pattern is None:
        yield "name", r"regex needs a pattern, for example 'answer is (\d+)'"
    elif reward.pattern is not None and reward.name != "regex":
        yield "pattern", f"only regex has a pattern, {reward.name} has none"
    elif reward.pattern is not None:
        try:
            groups = re.compile(reward.pattern).groups
        except re.error as error:
            yield "pattern", f"no regular expression: {error}"
        else:
            if groups == 0:
                advice = "put what is compared with the answer in brackets"
                yield "pattern", f"has no group: {advice}, not {shorten(reward.pattern)}"
    what = missing_plugin(reward.name, REWARDS, "function")
    if what := what or (missing_library() if reward.name == "reasoning_gym" else ""):
        yield "name", what


def check_run_name(config: RunConfig) -> Violations:
    """Find a name that is no folder name, or is taken by another run."""
    run = config.run
    if run.name is None:
        return
    folder = Path(run.dir) / str(run.name)
    if not re.fullmatch(r"\w[\w.+=-]*", str(run.name)):
        what = f"must be letters, digits and any of . _ - + =, not {shorten(repr(run.name))}"
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
        return f"{shorten(directory.partition('/')[0])} is no user of this machine"
    folder = Path(os.path.abspath(directory))
    while not os.path.lexists(folder) and folder != folder.parent:
        if len(os.fsencode(folder.name)) > _LONGEST_NAME:
            return f"{shorten(folder.name)} is longer than a folder's name can be, {_LONGEST_NAME} letters"
        folder = folder.parent
    if not os.path.isdir(folder):
        return f"{show_path(folder)} is no folder: choose another one"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{show_path(folder)} cannot be written to by this user: choose another folder"
    return ""


def missing_megatron() -> str | None:
    """Return the command to type if megatron-core is not installed. To look for more than its namespace would import
    it.
    """
    return None if find_spec("megatron") else "megatron needs megatron-core: pip install 'rlctl[megatron]'"


def missing_plugin(name: str, known: Iterable[str], kind: str) -> str:
    """Return the problem with a name that must be `known`, `module:object` or `file.py:object`; empty if none.

    Judged by the source alone. kind: the object's kind, a function or a Class.
    """
    if name in known:
        return ""
    if name.endswith(".py"):
        return f"{name} names a file alone: write {name}:{kind}"
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
        return f"no module {shorten(module)} beside the recipe, in the current directory or on the Python path"
    if not os.path.isfile(file):
        return f"no file {shorten(module)}{did_you_mean(module, map(str, file.parent.glob('*.py')))}"
    try:
        defined = _defined_names(file)
    except SyntaxError as error:
        return f"{show_path(file)}:{error.lineno}: not Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{show_path(file)}: not Python: {error}"
    if attribute in defined:
        return ""
    return f"{show_path(file)} defines no {attribute or kind}{did_you_mean(attribute, defined)}"


def require_plugin(where: str, name: str, known: Iterable[str], kind: str) -> None:
    """Raise ConfigError if a plugin is missing, see `missing_plugin`. where: the option that named it."""
    if what := missing_plugin(name, known, kind):
        raise ConfigError([Problem(where, "", what)])


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


def check_generated(config: RunConfig) -> Violations:
    """Find data sets that cannot be made, and held-out rows in training."""
    usable: dict[str, range] = {}
    for key, section in _sections(config):
        made = generator_of(section.path)
        if made is None and section.args:
            what = "are of rows that a library makes, as for the path reasoning_gym:chain_sum, not of those of"
            yield Violation(f"{key}.args", f"{what} {path_text(section.path)}", (f"{key}.path",))
        if made is None:
            continue
        generator, name = made
        problems = generator.problems(name, section.args)
        yield from (Violation(f"{key}.{inner}", what, (f"{key}.path",)) for inner, what in problems)
        if not problems:
            usable[key] = generator.seeds(name, section.args)
    held_out = usable.pop("data.validation", range(0))
    sections = dict(_sections(config))
    for key, seeds in usable.items():
        same = sections[key].path == sections["data.validation"].path
        if same and range(max(seeds.start, held_out.start), min(seeds.stop, held_out.stop)):
            own, theirs = (f"{each.start} to {each.stop - 1}" for each in (held_out, seeds))
            what = f"a row has a seed of its own, here {own}, and {theirs} in {key}: rows that are trained on would be "
            what += f"held out; {seeds.stop} is free"
            yield Violation("data.validation.args.seed", what, (f"{key}.args.seed",))


def _sections(config: RunConfig) -> Iterator[tuple[str, DatasetSection]]:
    """Yield (key, section) of every data set; that of data.train where it has no sources."""
    data = config.data
    if not data.train.sources:
        yield "data.train", data.train
    yield from ((f"data.train.sources.{name}", section) for name, section in data.train.sources.items())
    yield "data.validation", data.validation
