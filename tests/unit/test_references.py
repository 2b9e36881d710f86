"""Pages, docstrings, comments and messages name only files, classes, members, functions and keys that exist."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import get_origin

import pytest

import rlctl
from rlctl.config.cluster_schema import CLUSTER_KINDS
from rlctl.config.fields import RECIPE, schema_keys
from rlctl.config.schema import KINDS
from tests.prose import passages
from tests.unit.test_house import FILES, PACKAGE, tree

ROOT = PACKAGE.parent
FOLDERS = ("rlctl", "configs", "recipes", "examples", "tests", ".ci", ".github")
# A page of other tools' keys.
FOREIGN_PAGE = ROOT / "configs/COMING_FROM.md"
FOLDER_PAGES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))
PAGES = [ROOT / "README.md", *(path for path in FOLDER_PAGES if path != FOREIGN_PAGE)]
# This file has names that are stale on purpose.
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
ALL_FILES = [*PAGES, *FILES, *TESTS]
# A file of a reader's own, or of the file's own kind, as an example has it.
EXAMPLES = re.compile(r"(^|/)(my\w*|mine|file|NAME\w*|readme_\w+)\.\w+$|NAME|\*|MODULE|FOLDER|_N$|_$")
CODE = re.compile(r"`([^`\n]+)`")
A_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh)")
A_FOLDER = re.compile(r"(?:rlctl|tests|configs|recipes|examples)/[\w/.-]+")
A_MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)(?:\(.*\))?")
# A dotted name, perhaps called, perhaps with a value.
A_NAME = re.compile(r"([a-z_]\w*(?:\.\w+)*)(\(.*\))?((?:=|: ).*)?")
DATA_FILE = re.compile(r".*\.(?:py|md|sh|ya?ml|jsonl?|toml|log|js|css|png|svg|safetensors)(?:\.gz)?")
KEYS = dict(chain.from_iterable(map(schema_keys, (*KINDS.values(), *CLUSTER_KINDS.values()))))
# Keys of a mapping are its reader's own.
MAPPINGS = tuple(f"{key}." for key, field in KEYS.items() if get_origin(field.type) is dict)
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
A_KEY = re.compile(rf"(?<![\w./$-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_]\w*)+(?![\w/(*-])")
# Names of others, and of a reader's own part, each with its owner.
OTHERS = {
    "environment_factory": "TRL",
    "overlong_filtering": "NeMo-RL",
    "trust_remote_code": "transformers",
    "masked_whiten": "verl",
    "_get_and_verify_max_len": "vLLM",
    "compute_hash": "vLLM",
    "_compute_yarn_parameters": "transformers",
    "model.layers": "a model's names on disk",
    "model.norm.weight": "a model's names on disk",
    "model.embed_tokens.weight": "a model's names on disk",
    "nohup": "the shell",
    "python3": "the shell",
    "vegaLite": "Vega",
    "choices.0": "the place of a column's value in a row",
    "grpo.loss.tau_down": "the loss of the example in grpo/README.md",
    "grpo.num_step": "the mistake that the first page shows",
    "grpo.a": "any key, in a docstring on two of them",
    "sft.b": "any key, in a docstring on two of them",
}
LIBRARIES = {*sys.stdlib_module_names, "megatron", "ray", "torch", "transformers", "vllm"}
CITED = re.compile(r"[Cc]ontracts? \d+(?:(?:, | and )\d+)*")
A_CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the prose of a file. A page's tables count, its blocks of code do not."""
    if path.suffix == ".md":
        text = re.sub(r"(?ms)^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), path.read_text())
        yield from enumerate(text.splitlines(), start=1)
    else:
        yield from ((passage.line, passage.text) for passage in passages(path))


@cache
def code_in_prose() -> list[tuple[Path, str, str]]:
    """Return (file, place, text) of everything between backticks."""
    spans = list[tuple[Path, str, str]]()
    for path in ALL_FILES:
        for line, text in prose(path):
            spans += [(path, f"{path.relative_to(ROOT)}:{line}: {code}", code) for code in CODE.findall(text)]
    return spans


def matches_in_code(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str, re.Match[str]]]:
    """Yield (file, place, match) of everything between backticks that is such a name."""
    for path, place, code in code_in_prose():
        match = pattern.fullmatch(code.removesuffix("()"))
        if match and not EXAMPLES.search(code):
            yield path, place, match


@cache
def files() -> frozenset[str]:
    names = set[str]()
    for folder in FOLDERS:
        names |= {path.name for path in (ROOT / folder).rglob("*")}
    return frozenset(names)


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return {class: (its bases, its methods and fields)}, by their names."""
    members = dict[str, tuple[set[str], set[str]]]()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                inside = list(ast.walk(node))
                names = {inner.name for inner in inside if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {inner.id for inner in inside if isinstance(inner, ast.Name)}
                names |= {inner.attr for inner in inside if isinstance(inner, ast.Attribute)}
                members[node.name] = (bases, names)
    return members


def has_member(kind: str, name: str) -> bool:
    """Return True if the class or one of its bases has the member, or a base is not of this package."""
    if kind not in classes():
        return kind not in ("Protocol", "ABC", "Generic", "object")
    bases, names = classes()[kind]
    return name in names or any(has_member(base, name) for base in bases)


@cache
def matches_elsewhere(pattern: str) -> frozenset[str]:
    """Return the matches of a pattern in modules and tests, except between backticks."""
    matches = set[str]()
    for path in [*FILES, *TESTS]:
        matches.update(re.findall(pattern, CODE.sub("", path.read_text())))
    return frozenset(matches)


def words_elsewhere() -> frozenset[str]:
    return matches_elsewhere(r"\w+")


def called_names() -> frozenset[str]:
    return matches_elsewhere(r"(\w+)\(")


@cache
def names_in() -> dict[str, set[str]]:
    """Return {module or folder: its names}: functions, classes, variables, methods, fields, modules."""
    modules: dict[str, set[str]] = {}
    for path in FILES:
        names = modules.setdefault(path.stem, set())
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
        modules.setdefault(path.parent.name, set()).add(path.stem)
    return modules


def is_key(name: str) -> bool:
    """Return True for a key of a run or a cluster, or its last words; also for one of the recipe in an SFT config."""
    name = name.removeprefix("config.").removeprefix(f"{RECIPE}.")
    is_end = "." in name and any(key.endswith(f".{name}") for key in KEYS)
    return name in KEYS or is_end or name.startswith(MAPPINGS)


def is_known(name: str, *, is_called: bool = False) -> bool:
    """Return True for a key, a name of another library, or one that its module, its class or the code has."""
    *owners, last = name.split(".")
    if name in OTHERS or is_key(name):
        return True
    if owners == ["rlctl"]:
        return last in dir(rlctl)
    if is_called and last not in called_names():
        return False
    if not owners:
        return is_called or name in words_elsewhere()
    if owners[0] in LIBRARIES - names_in().keys():
        return True
    owner = owners[-1]
    # A variable may have the name of its class: `header.prove`.
    kind = "".join(word.capitalize() for word in owner.split("_"))
    if last in names_in().get(owner, ()) or (kind in classes() and has_member(kind, last)):
        return True
    return owner not in names_in() and owners[0] not in SECTIONS and last in words_elsewhere()


def test_a_file_that_is_named_exists() -> None:
    stale = []
    for path, place, match in matches_in_code(A_FILE):
        name = match[0]
        homes = (path.parent, path.parent.parent, path.parents[2], PACKAGE, ROOT, ROOT / "tests", ROOT / "tests/unit")
        if not any((home / name).exists() for home in homes) and ("/" in name or name not in files()):
            stale.append(place)
    assert stale == []


def test_a_folder_that_is_named_exists() -> None:
    folders = [(place, ROOT / match[0].partition("::")[0]) for _, place, match in matches_in_code(A_FOLDER)]
    assert [place for place, folder in folders if not folder.exists()] == []


def test_a_member_that_is_named_is_the_classs() -> None:
    assert [place for _, place, match in matches_in_code(A_MEMBER) if not has_member(match[1], match[2])] == []


def contracts() -> dict[int, list[str]]:
    """Return {number of a contract of rlctl/README.md: its tests, each as file::function}."""
    section = (PACKAGE / "README.md").read_text().partition("\n## Contracts\n")[2].partition("\n## ")[0]
    parts = re.split(r"(?m)^(\d+)\. ", section)[1:]
    numbers = map(int, parts[::2])
    return {number: re.findall(r"`(tests/[\w/]+\.py::\w+)`", text) for number, text in zip(numbers, parts[1::2])}


def test_each_contract_has_tests_and_each_of_them_exists() -> None:
    assert list(contracts()) == list(range(1, 13))
    lost = []
    for number, names in contracts().items():
        assert names, f"no test holds contract {number}"
        for name in names:
            file, _, function = name.partition("::")
            if not (ROOT / file).is_file() or f"\ndef {function}(" not in (ROOT / file).read_text():
                lost.append(f"contract {number}: {name}")
    assert lost == []


def test_a_contract_that_is_cited_is_one_of_the_twelve_and_code_cites_all_in_one_form() -> None:
    strange = []
    for path in ALL_FILES:
        for line, text in prose(path):
            for cited in CITED.findall(text):
                if not {int(number) for number in re.findall(r"\d+", cited)} <= set(contracts()):
                    strange.append(f"{path.relative_to(ROOT)}:{line}: {cited}")
                elif path in FILES and f"({cited})" not in text:
                    strange.append(f"{path.relative_to(ROOT)}:{line}: {cited} is not in brackets")
    assert strange == []


def texts_with_keys() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of pages, strings of modules, and YAML files."""
    for page in PAGES:
        for line, text in prose(page):
            yield f"{page.relative_to(ROOT)}:{line}", text
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")]:
        yield str(path.relative_to(ROOT)), path.read_text()


def test_a_name_between_backticks_is_a_key_or_in_the_code() -> None:
    stale = []
    for _, place, match in matches_in_code(A_NAME):
        if not DATA_FILE.fullmatch(match[1]) and not is_known(match[1], is_called=bool(match[2])):
            stale.append(place)
    assert stale == []


def test_a_key_in_a_message_or_on_a_page_is_in_the_schema() -> None:
    stale = []
    for place, text in texts_with_keys():
        for key in A_KEY.findall(text):
            if not DATA_FILE.fullmatch(key) and not is_known(key):
                stale.append(f"{place}: {key}")
    assert stale == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.residency", False),
        ("memory.residency", True),
        ("trainer.micro_batch_token", False),
        ("trainer.micro_batch_tokens", True),
        ("config.trainer.micro_batch_tokens", True),
        ("data.train.args.seed", True),
        ("validation.recipe.grpo.num_step", False),
        ("placement.places", False),
        ("asyncio.gather", True),
        ("process_memories", False),
        ("residencies", False),
        ("rlctl.train", True),
        ("rlctl.trian", False),
    ],
)
def test_a_stale_name_is_noticed(name: str, expected: bool) -> None:
    assert is_known(name) is expected


def test_a_stale_function_is_noticed() -> None:
    assert is_known("process_memory", is_called=True) and not is_known("processmemory", is_called=True)


def test_a_class_that_is_named_is_in_the_code() -> None:
    assert [place for _, place, match in matches_in_code(A_CLASS) if match[0] not in words_elsewhere()] == []
