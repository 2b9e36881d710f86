"""Pages, docstrings and comments name only files, classes and members that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.prose import passages
from tests.unit.test_house import FILES, PACKAGE, tree

ROOT = PACKAGE.parent
FOLDERS = ("rlctl", "configs", "recipes", "tests", ".ci", ".github")
PAGES = [ROOT / "README.md", *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md")))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# A file of a reader's own, or of the file's own kind, as an example has it.
EXAMPLES = re.compile(r"(^|/)(my\w*|mine|file|NAME\w*|readme_\w+)\.\w+$|NAME|\*|MODULE|FOLDER")
CODE = re.compile(r"`([^`\n]+)`")
A_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh)")
A_FOLDER = re.compile(r"(?:rlctl|tests|configs|recipes)/[\w/.-]+")
A_MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)")
IN_A_MODULE = re.compile(r"(?:\w+\.)*([a-z]\w*)\.([A-Z]\w*)")
A_CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+")


@cache
def code_in_prose() -> list[tuple[Path, str, str]]:
    """(file, place, text) of everything between backticks."""
    return [
        (path, f"{path.relative_to(ROOT)}:{passage.line}: {code}", code)
        for path in [*PAGES, *FILES]
        for passage in passages(path)
        for code in CODE.findall(passage.text)
    ]


def named(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str, re.Match[str]]]:
    """Yield (file, place, match) of everything between backticks that is such a name."""
    for path, place, code in code_in_prose():
        if (found := pattern.fullmatch(code.removesuffix("()"))) and not EXAMPLES.search(code):
            yield path, place, found


@cache
def files() -> frozenset[str]:
    return frozenset(path.name for name in FOLDERS for path in (ROOT / name).rglob("*"))


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Class -> (its bases, its methods and fields), by their names."""
    found = dict[str, tuple[set[str], set[str]]]()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                inside = list(ast.walk(node))
                names = {each.name for each in inside if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {each.id for each in inside if isinstance(each, ast.Name)}
                names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
                found[node.name] = bases, names
    return found


def has_member(kind: str, name: str) -> bool:
    """Return True if the class or one of its bases has the member, or a base is not of this package."""
    if kind not in classes():
        return kind not in ("Protocol", "ABC", "Generic", "object")
    bases, names = classes()[kind]
    return name in names or any(has_member(base, name) for base in bases)


@cache
def words_elsewhere() -> frozenset[str]:
    """Words of modules and tests that are not between backticks."""
    texts = (CODE.sub("", path.read_text()) for path in [*FILES, *TESTS])
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def test_a_file_that_is_named_exists() -> None:
    wrong = []
    for path, place, found in named(A_FILE):
        name = found[0]
        homes = (path.parent, path.parent.parent, path.parents[2], PACKAGE, ROOT, ROOT / "tests", ROOT / "tests/unit")
        if not any((home / name).exists() for home in homes) and ("/" in name or name not in files()):
            wrong.append(place)
    assert wrong == []


def test_a_folder_that_is_named_exists() -> None:
    found = [(place, ROOT / match[0].partition("::")[0]) for _, place, match in named(A_FOLDER)]
    assert [place for place, path in found if not path.exists()] == []


def test_a_member_that_is_named_is_the_classs() -> None:
    assert [place for _, place, found in named(A_MEMBER) if not has_member(*found.groups())] == []


def test_a_name_of_a_module_is_made_there() -> None:
    made: dict[str, set[str]] = {}
    for path in FILES:
        nodes = list(ast.walk(tree(path)))
        names = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made.setdefault(path.stem, set()).update(names)
    found = [(place, *match.groups()) for _, place, match in named(IN_A_MODULE)]
    assert [place for place, module, name in found if module in made and name not in made[module]] == []


def test_a_class_that_is_named_is_in_the_code() -> None:
    assert [place for _, place, found in named(A_CLASS) if found[0] not in words_elsewhere()] == []
