"""Checks of the files that a config names: data files, modules of rewards, the run's directory.

No user code is imported. `missing_megatron` looks for the package that backend megatron needs.
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
from rlctl.config.grpo_schema import AnyRewardSection, RewardSection
from rlctl.config.plugins import REWARDS
from rlctl.config.provenance import show_path
from rlctl.config.schema import RunConfig
from rlctl.data.datasets import generator_of, path_text
from rlctl.data.files import FILE_SUFFIXES, DataError, files_of, first_row, is_file_of_rows
from rlctl.data.nested_columns import convention, has_column
from rlctl.data.reasoning_gym import missing_library
from rlctl.preflight.backend import Violation, Violations

# Longest name of a run's folder in bytes: 255 in most file systems, less the text that rlctl adds.
_LONGEST_NAME = 200


def check_data(config: RunConfig) -> Violations:
    """Find data files that cannot be used. Data sets of the hub and folders are not read."""
    data = config.data
    if not data.train.path and not data.train.sources:
        yield Violation("data.train.path", "not set: a file (.jsonl, .json, .csv, .parquet), or a hub dataset name")
    if data.train.path is not None and data.train.sources:
        message = "data.train.path names a data set, and these name others: set path to null or sources to {}"
        yield Violation("data.train.sources", message, ("data.train.path",))
    sources = {f"train.sources.{name}": section for name, section in data.train.sources.items()}
    for name, dataset in {"train": data.train, "validation": data.validation, **sources}.items():
        problems = _check_dataset(dataset, config.needs_prompts, config.needs_answers, f"data.{name}")
        for where, key, message in problems:
            yield Violation(f"data.{name}.{key}", message, where=where)
    if data.validation.path is not None and data.validation.fraction is not None:
        message = (
            "holds rows of data.train out, and data.validation.path names others: "
            "set data.validation.path=null to hold rows out, or data.validation.fraction=null"
        )
        yield Violation("data.validation.fraction", message, ("data.validation.path",))


def check_validation(config: RunConfig) -> Violations:
    """Find validation with several greedy answers, which would all be the same."""
    count = config.validation.num_generations
    if count > 1 and config.validation.temperature == 0:
        message = f"{count} greedy answers are all the same; set validation.temperature above 0, or 1 here"
        yield Violation("validation.num_generations", message, ("validation.temperature",))


def _check_dataset(
    dataset: DatasetSection, needs_prompt: bool, needs_answer: bool, key: str
) -> Iterator[tuple[str, str, str]]:
    """Yield (where, key, problem) for unusable files. Columns are checked in the first row of the first file.

    where: line of the data file; empty: the config's line. needs_prompt: each row needs a prompt. needs_answer: each
    row needs an answer; a row that is a chat has it as its last message. key: dotted key of the section.
    """
    files = [file for file in files_of(dataset.path or []) if os.path.isfile(file)]
    for file in files:
        if not is_file_of_rows(file):
            suffixes = f"{', '.join(FILE_SUFFIXES[:-1])} or {FILE_SUFFIXES[-1]}"
            yield "", "path", f"{show_path(Path(file))} is no {suffixes} file"
            return
    # Without pyarrow a Parquet file is not checked: pyarrow comes with the engines, so a run without it fails anyway.
    if not files or (files[0].endswith(".parquet") and find_spec("pyarrow") is None):
        return
    path = files[0]
    try:
        place, row = first_row(path)
    except (OSError, DataError) as error:
        reason = str(error).removeprefix(path).removeprefix(": ")
        # A reason such as `:3: not JSON` continues the path.
        separator = "" if reason[:1] in ":[" else ": "
        yield "", "path", f"{show_path(Path(path))}{separator}{reason}"
        return
    where = f"{show_path(Path(path))}{place.removeprefix(path)}"
    if has_column(row, dataset.messages_key):
        return
    remedy = convention(row, key)
    column_list = f"; it has {', '.join([*row][:8])}"
    if needs_prompt and not has_column(row, dataset.prompt_key):
        hint = remedy or did_you_mean(dataset.prompt_key, row) or column_list
        yield where, "prompt_key", f"no column {dataset.prompt_key} or {dataset.messages_key}{hint}"
        # The remedy already names `answer_key`.
        needs_answer = needs_answer and not remedy
    if needs_answer and not has_column(row, dataset.answer_key):
        hint = remedy or did_you_mean(dataset.answer_key, row) or column_list
        yield where, "answer_key", f"no column {dataset.answer_key}{hint}"


def check_reward(reward: AnyRewardSection) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each wrong key of one reward. `check_roles` has those of a reward model's files."""
    if not isinstance(reward, RewardSection):
        return
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
    yield from reward.problems()
    message = missing_plugin(reward.name, REWARDS, "function")
    if not message and reward.name == "reasoning_gym":
        message = missing_library()
    if message:
        yield "name", message


def check_run_name(config: RunConfig) -> Violations:
    """Find a `run.name` that is no valid folder name, or the name of an existing run."""
    run = config.run
    if run.name is None:
        return
    folder = Path(run.dir) / str(run.name)
    if not re.fullmatch(r"\w[\w.+=-]*", str(run.name)):
        message = f"must be letters, digits and any of . _ - + =, not {shorten(repr(run.name))}"
    elif len(os.fsencode(run.name)) > _LONGEST_NAME:
        message = f"must be at most {_LONGEST_NAME} letters, since it names a folder, not {len(run.name)}"
    elif not os.path.exists(folder):
        return
    elif (folder / "config.yaml").is_file():
        message = f"{folder} exists: continue it with --resume {quote(str(folder))}, or choose another name"
    else:
        message = f"{folder} exists: choose another name"
    yield Violation("run.name", message)


def check_run_folder(config: RunConfig) -> Violations:
    """Find a `run.dir` that cannot be created or written to."""
    if message := _unwritable(config.run.dir):
        yield Violation("run.dir", message)


def _unwritable(directory: str) -> str:
    """Return why a folder cannot be created or written to; empty if it can."""
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
        return f"{folder} cannot be written to by this user: choose another folder, run.dir=FOLDER"
    return ""


def missing_megatron() -> str | None:
    """Return a message with the install command if megatron-core is missing, else None.

    Only the namespace `megatron` is looked up: `find_spec` of a submodule would import the package.
    """
    return None if find_spec("megatron") else "megatron needs megatron-core: pip install 'rlctl[megatron]'"


def missing_plugin(name: str, known_names: Iterable[str], kind: str) -> str:
    """Return the problem of a name that must be a known one, `module:object` or `file.py:object`; empty if none.

    The module is parsed, not imported. kind: word for the object in messages, "function" or "Class".
    """
    if name in known_names:
        return ""
    if name.endswith(".py"):
        return f"{name} names a file alone: write {name}:{kind}"
    if ":" not in name:
        return f"must be {', '.join(known_names)} or module:{kind}, not {name}{did_you_mean(name, known_names)}"
    module, _, attribute = name.rpartition(":")
    file: Path | None = Path(module)
    if not module.endswith(".py"):
        names = module.split(".")
        is_dotted_name = all(name.isidentifier() for name in names)
        file = _find_module("/".join(names)) if is_dotted_name else None
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


def require_plugin(where: str, name: str, known_names: Iterable[str], kind: str) -> None:
    """Raise ConfigError if a plugin is missing, see `missing_plugin`. where: command-line option that gave the name."""
    if message := missing_plugin(name, known_names, kind):
        raise ConfigError([Problem(where, "", message)])


def _find_module(path: str) -> Path | None:
    """Return the file of a module, looked for in the current directory and on the Python path; None if there is none.

    path: the module's name with slashes.
    """
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for file in (folder / f"{path}.py", folder / f"{path}/__init__.py"):
            if os.path.isfile(file):
                return file
    return None


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
    """Find generated data sets with wrong arguments, or with the same seeds in training and validation."""
    seeds_by_key: dict[str, range] = {}
    for key, section in _dataset_sections(config):
        generator_and_name = generator_of(section.path)
        if generator_and_name is None:
            if section.args:
                message = "are for rows that a library makes, as with path=reasoning_gym:chain_sum, not for those of"
                yield Violation(f"{key}.args", f"{message} {path_text(section.path)}", (f"{key}.path",))
            continue
        generator, name = generator_and_name
        problems = generator.problems(name, section.args)
        yield from (Violation(f"{key}.{inner}", message, (f"{key}.path",)) for inner, message in problems)
        if not problems:
            seeds_by_key[key] = generator.seeds(name, section.args)
    held_out = seeds_by_key.pop("data.validation", range(0))
    sections = dict(_dataset_sections(config))
    for key, seeds in seeds_by_key.items():
        is_same_dataset = sections[key].path == sections["data.validation"].path
        common_seeds = range(max(seeds.start, held_out.start), min(seeds.stop, held_out.stop))
        if is_same_dataset and common_seeds:
            held_out_text = f"{held_out.start} to {held_out.stop - 1}"
            trained_text = f"{seeds.start} to {seeds.stop - 1}"
            message = f"a row has a seed of its own, here {held_out_text}, and {trained_text} in {key}: rows that are "
            message += f"trained on would be held out; {seeds.stop} is free"
            yield Violation("data.validation.args.seed", message, (f"{key}.args.seed",))


def _dataset_sections(config: RunConfig) -> Iterator[tuple[str, DatasetSection]]:
    """Yield (key, section) of every data set. data.train itself counts only if it has no sources."""
    data = config.data
    if not data.train.sources:
        yield "data.train", data.train
    yield from ((f"data.train.sources.{name}", section) for name, section in data.train.sources.items())
    yield "data.validation", data.validation
