"""Counts of four habits that make prose slow to read, in docstrings, comments and Markdown.

They are sentences with two relative words, "what" and its kin, a pronoun after a preposition where a noun belongs, and
worn adverbs. Code that reads at once has at most 1% of the first, and 8, 5 and 2 of the others in 10,000 words.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path

_RELATIVE = re.compile(r"\b(that|which|who|whose|whom|what)\b", re.IGNORECASE)
# Name of a habit -> pattern. Hits are counted in 10,000 words.
_HABITS = {
    "what": re.compile(r"\b(what|whatever|whoever|that which)\b", re.IGNORECASE),
    "of-it": re.compile(
        r"\b(of|for|by|to|with) (it|them|its own|their own|one's own|those|theirs|ours)\b", re.IGNORECASE
    ),
    "archaic": re.compile(r"\b(so many|so much|so long|alike|beside|under way|in all|for ever|anew)\b", re.IGNORECASE),
}
FIGURES = ("relative", *_HABITS)
# A passage must not begin with one of these words, because the subject or the verb comes first.
_OPENING = re.compile(r"(Of|What|That|Whether|See|Its|Until|How|Which)\b")
_NO_PROSE = re.compile(r"#\s*(type:|noqa|!)")
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_LEAST_WORDS = 3


@dataclass(frozen=True)
class Passage:
    """A docstring, successive comment lines, or a paragraph of a page."""

    path: Path
    line: int
    text: str

    @property
    def sentences(self) -> list[str]:
        """Sentences of three words or more, each on one line."""
        parts = (" ".join(part.split()) for part in re.split(r"(?<=[.;:])\s+|\n\n", self.text))
        return [part for part in parts if len(part.split()) >= _LEAST_WORDS]


@dataclass
class Measure:
    """Counts of each habit in some passages, with the sentences that contain it."""

    words: int = 0
    sentences: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    # Figure -> (hits, place, sentence).
    offenders: dict[str, list[tuple[int, str, str]]] = field(default_factory=lambda: {name: [] for name in FIGURES})
    # Passages that begin with a word of `_OPENING`, each with file and line.
    openings: list[str] = field(default_factory=list)

    def value(self, figure: str) -> float:
        """Return the percentage of sentences for `relative`, the hits in 10,000 words for the others."""
        if figure == "relative":
            return 100 * self.counts[figure] / max(1, self.sentences)
        return 10_000 * self.counts[figure] / max(1, self.words)

    def worst(self, figure: str, limit: int) -> list[str]:
        """Return the sentences with the most hits, each with its file and line."""
        ranking = sorted(self.offenders[figure], key=itemgetter(0), reverse=True)
        return [f"{place}: {sentence[:200]}" for _, place, sentence in ranking[:limit]]


def measure(files: Iterable[Path], root: Path) -> Measure:
    """Return the figures of Python files and pages. root: the folder that their places are relative to."""
    total = Measure()
    for path in files:
        figures_of_file = _measure_file(path, root)
        total.words += figures_of_file.words
        total.sentences += figures_of_file.sentences
        total.counts += figures_of_file.counts
        total.openings += figures_of_file.openings
        for figure in FIGURES:
            total.offenders[figure] += figures_of_file.offenders[figure]
    return total


@cache
def _measure_file(path: Path, root: Path) -> Measure:
    """Return the figures of a file, which is in a folder and in the folders above it."""
    measured = Measure()
    for passage in passages(path):
        place = f"{passage.path.relative_to(root)}:{passage.line}"
        measured.words += len(passage.text.split())
        if _OPENING.match(passage.text.strip()):
            measured.openings.append(f"{place}: {passage.text.strip()[:100]}")
        for habit, pattern in _HABITS.items():
            measured.counts[habit] += len(pattern.findall(passage.text))
        for sentence in passage.sentences:
            measured.sentences += 1
            hits = {habit: len(pattern.findall(sentence)) for habit, pattern in _HABITS.items()}
            relative_words = len(_RELATIVE.findall(sentence))
            if relative_words >= 2:
                measured.counts["relative"] += 1
                hits["relative"] = relative_words
            for figure, number in hits.items():
                if number:
                    measured.offenders[figure].append((number, place, sentence))
    return measured


@cache
def passages(path: Path) -> list[Passage]:
    """Return the prose of a Python file or a page; tables and code of a page are none."""
    return list(_passages(path, path.read_text(encoding="utf-8")))


def _passages(path: Path, text: str) -> Iterator[Passage]:
    if path.suffix == ".md":
        yield from _paragraphs(path, text)
        return
    for node in _scopes(ast.parse(text)):
        if docstring := ast.get_docstring(node):
            yield Passage(path, node.body[0].lineno, docstring)
    yield from _comments(path, text)


def _scopes(node: ast.AST) -> "Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]":
    """Yield modules, classes and functions. Only statements have them inside, so that expressions are passed over."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _scopes(child)


def _paragraphs(path: Path, text: str) -> Iterator[Passage]:
    line = 1
    for block in re.split(r"(\n\s*\n)", _FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)):
        if block.strip() and not block.lstrip().startswith("|"):
            yield Passage(path, line, block)
        line += block.count("\n")


def _comments(path: Path, text: str) -> Iterator[Passage]:
    """Yield comments; those on successive lines are one passage."""
    first_line = 0
    lines = list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _NO_PROSE.match(token.string):
            continue
        if lines and token.start[0] != first_line + len(lines):
            yield Passage(path, first_line, " ".join(lines))
            lines = []
        if not lines:
            first_line = token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield Passage(path, first_line, " ".join(lines))
