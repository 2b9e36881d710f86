"""Counts of eight habits that make code slow to read: names that could stand for anything, and several things a line.

Comments and docstrings are measured by `prose.py`. `python -m tests.plain FOLDER` prints the figures of a folder and
examples of each.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

# Names that say nothing about their content.
_VAGUE = frozenset({
    "again", "all_of", "asked", "at", "begun", "both", "each", "else_", "found", "given", "had", "held", "here",
    "kept", "known", "least", "left", "made", "mine", "more", "most", "named", "needed", "one", "others", "ours",
    "own", "said", "shown", "so_far", "such", "taken", "theirs", "them", "there", "thing", "things", "those", "told",
    "usual", "wanted", "what", "whole", "why", "wrong",
})  # fmt: skip
# Names that only fill a place, such as single letters.
_FILLER = frozenset({
    "cur", "data", "elem", "element", "entry", "info", "it", "item", "obj", "res", "result", "ret", "stuff", "tmp",
    "val", "value",
})  # fmt: skip
# Matches names of functions that are a participle, an adverb or a preposition instead of a verb.
_MUTE = re.compile(
    r"after|apart|at|before|begun|beside|cut|drawn|given|held|kept|left|lost|of|on|only|others|said|shown|taken|there|"
    r"told|whole|wider|within|[a-z]+ed"
)
_VERBS = frozenset({
    "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed",
})  # fmt: skip
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPACT = (*_COMPREHENSIONS, ast.NamedExpr, ast.IfExp, ast.Lambda, ast.Starred)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONDITIONS = frozenset({
    "all", "any", "bool", "callable", "hasattr", "isinstance",
})  # fmt: skip
# Number of compact expressions from which a line counts as dense.
_DENSE = 3
# Figure -> its unit.
UNITS = {
    "vague": "% of names",
    "tuples": "in 10,000 lines",
    "triples": "in 10,000 lines",
    "walruses": "in 10,000 lines",
    "nested": "in 10,000 lines",
    "dense": "in 10,000 lines",
    "arithmetic": "in all",
    "mute": "in all",
    "filler": "% of names",
}


@dataclass
class Measure:
    """Counts of each habit in some files, with file, line and text of each hit."""

    lines: int = 0
    names: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    offenders: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, other: "Measure") -> None:
        self.lines += other.lines
        self.names += other.names
        self.counts += other.counts
        self.offenders += other.offenders

    def value(self, figure: str) -> float:
        """Return a figure in its unit."""
        count = self.counts[figure]
        if UNITS[figure] == "% of names":
            return 100 * count / max(1, self.names)
        if UNITS[figure] == "in 10,000 lines":
            return 10_000 * count / max(1, self.lines)
        return count

    def examples(self, figure: str, limit: int) -> list[str]:
        """Return the first hits of a habit, each with file, line and text."""
        places = [f"{place}: {text}" for habit, place, text in self.offenders if habit == figure]
        return places[:limit]


def measure(files: Iterable[Path], root: Path) -> Measure:
    """Return the figures of Python files. root: the folder that their places are relative to."""
    total = Measure()
    for path in files:
        total.add(_measure_file(path, root))
    return total


@cache
def _measure_file(path: Path, root: Path) -> Measure:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    measured = Measure()
    measured.lines = sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
    for name in _bound_names(tree):
        measured.names += 1
        if len(name.strip("_")) == 1 or name.strip("_") in _FILLER:
            measured.counts["filler"] += 1
    for habit, node in _habits(tree):
        measured.counts[habit] += 1
        first_line = ast.unparse(node).partition("\n")[0]
        measured.offenders.append((habit, f"{path.relative_to(root)}:{_line(node)}", first_line[:100]))
    return measured


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = _bound_name(node)
        if name and name not in ("self", "cls"):
            yield name


def _bound_name(node: ast.AST) -> str:
    """Return the name of the variable, attribute or parameter that a node binds; empty if it binds none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.ExceptHandler(name=str(name)):
            return name
    return ""


def _habits(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (figure, node) of each habit but filler."""
    heads = set(_walruses_in_heads(tree))
    for node in ast.walk(tree):
        if _bound_name(node).strip("_") in _VAGUE:
            yield "vague", node
        if isinstance(node, _COMPREHENSIONS) and _is_nested(node.generators):
            yield "nested", node
        if isinstance(node, ast.NamedExpr) and node not in heads:
            yield "walruses", node
        if isinstance(node, ast.BinOp) and _is_arithmetic(node):
            yield "arithmetic", node
        if isinstance(node, _FUNCTIONS) and _is_mute(node.name.strip("_")):
            yield "mute", ast.copy_location(ast.Expr(ast.Name(node.name)), node)
        if isinstance(node, ast.Assign):
            number = _names_of_tuple(node)
            if number:
                yield "tuples", node
            if number >= 3:
                yield "triples", node
    for line in _dense_lines(tree):
        yield "dense", line


def _is_nested(generators: list[ast.comprehension]) -> bool:
    return len(generators) > 1 or any(len(generator.ifs) > 1 for generator in generators)


def _is_mute(name: str) -> bool:
    if name in _VERBS:
        return False
    return _MUTE.fullmatch(name) is not None


def _names_of_tuple(node: ast.Assign) -> int:
    """Return the number of names that get separate values in one statement; 0 if one call gives all values."""
    target = node.targets[0]
    several = (ast.Tuple, ast.List, ast.GeneratorExp, ast.ListComp)
    if isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, several):
        return len(target.elts)
    return 0


def _walruses_in_heads(tree: ast.AST) -> Iterator[ast.NamedExpr]:
    """Yield assignments in the head of an `if` or `while` whose body uses the name."""
    for branch in ast.walk(tree):
        if not isinstance(branch, ast.If | ast.While):
            continue
        nodes_of_body = chain.from_iterable(map(ast.walk, branch.body))
        names_of_body = {node.id for node in nodes_of_body if isinstance(node, ast.Name)}
        for node in _outside_of_scopes(branch.test):
            if isinstance(node, ast.NamedExpr) and node.target.id in names_of_body:
                yield node


def _outside_of_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes inside, except those inside a comprehension or a lambda."""
    if isinstance(node, (*_COMPREHENSIONS, ast.Lambda)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_of_scopes(child)


def _is_arithmetic(node: ast.BinOp) -> bool:
    """Return True if a list or a text is multiplied by a condition."""
    sides = (node.left, node.right)
    has_several = any(isinstance(side, ast.List | ast.Tuple) or _is_text(side) for side in sides)
    return isinstance(node.op, ast.Mult) and has_several and any(map(_is_condition, sides))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_condition(node: ast.expr) -> bool:
    """Return True if an expression is a condition by its form or by its name."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _CONDITIONS
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(("is_", "has_"))
    return False


def _dense_lines(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield one node of each line with three compact expressions or more."""
    compact_by_line = Counter[int]()
    last_by_line = dict[int, ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, _COMPACT) or (isinstance(node, ast.BoolOp) and len(node.values) > 2):
            compact_by_line[_line(node)] += 1
            last_by_line[_line(node)] = node
    for line, number in compact_by_line.items():
        if number >= _DENSE:
            yield last_by_line[line]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    figures = measure(sorted(folder.rglob("*.py")), folder)
    for figure, unit in UNITS.items():
        print(f"{figure:12} {figures.value(figure):7.1f} {unit}")
        for example in figures.examples(figure, 12):
            print(f"    {example}")
