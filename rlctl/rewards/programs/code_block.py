"""Program in a completion, and the check if its results may be kept."""

import ast
import re

from rlctl.rewards.final_answer import cut_thinking

# A fence at the beginning of a line: three backticks or tildes, and the language behind an opening one.
_FENCE = re.compile(r"^[ \t]*(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+#.-]*)[^\n]*$", re.MULTILINE)
PYTHON = ("python", "python3", "py", "py3")
# Modules whose functions give the same for the same arguments.
_PURE_MODULES = {
    *("abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "decimal", "enum", "fractions"),
    *("functools", "heapq", "itertools", "json", "math", "numbers", "operator", "re", "statistics", "string"),
    *("textwrap", "typing", "__future__", "collections.abc"),
}
# Names with which a program may reach a clock, randomness, its process or any other name.
_IMPURE_NAMES = {
    *("__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hash", "help"),
    *("id", "locals", "object", "open", "setattr", "vars"),
}
_KNOWN_DUNDERS = {
    *("__init__", "__name__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__", "__next__"),
    *("__str__", "__repr__", "__add__", "__sub__", "__mul__", "__getitem__", "__setitem__", "__contains__", "__call__"),
    *("__bool__", "__slots__", "__post_init__"),
}


def find_program(completion: str, languages: tuple[str, ...] = PYTHON) -> str:
    """Return the last fenced block of a language, else the last one without a language, else the text without a fence.

    Thinking is left out. A block that the completion's end cuts off counts. Empty if all blocks are of other languages.
    languages: lower-case names; empty means any.
    """
    text = cut_thinking(completion)
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence["marks"].startswith(opening["marks"]) and not fence["language"]:
            blocks.append((opening["language"].lower(), text[opening.end() + 1 : fence.start()]))
            opening = None
    if opening is not None:
        blocks.append((opening["language"].lower(), text[opening.end() + 1 :]))
    if not blocks:
        return text.strip("\n")
    tagged = [source for language, source in blocks if language in languages or (not languages and language)]
    untagged = [source for language, source in blocks if not language]
    return (tagged or untagged or [""])[-1]


def is_repeatable(program: str) -> bool:
    """Return True if a Python program gives the same results each time, as far as its text shows.

    It imports known modules alone, and uses no name that leads to a clock, to randomness or to its process. A program
    that cannot be parsed fails each time.
    """
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            if any(alias.name not in _PURE_MODULES for alias in node.names):
                return False
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module not in _PURE_MODULES:
                return False
        elif isinstance(node, ast.Name) and node.id in _IMPURE_NAMES:
            return False
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name.startswith("__") and name not in _KNOWN_DUNDERS:
                return False
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
                return False
        # The order of a set of texts depends on the seed of their hashes, which the judge fixes.
    return True
