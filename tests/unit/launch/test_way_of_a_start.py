"""The way of a start, as launch/README.md lists it, names functions that exist, and is as short as it says."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "rlctl"
README = (PACKAGE / "launch/README.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)` (.*)$", README, re.MULTILINE)


def list_functions(file: Path) -> set[str]:
    """Return the names of a file's functions and methods."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_each_function_on_the_way_exists() -> None:
    assert [f"{file}:{name}" for file, name, _ in STEPS if name not in list_functions(PACKAGE / file)] == []


def test_the_way_has_at_most_28_calls_down_and_3_up_as_counted() -> None:
    up = sum("This call goes up" in text for *_, text in STEPS)
    down = len(STEPS) - 1 - up
    assert down <= 28 and up <= 3
    assert f"{down} calls go down and {up} go up." in " ".join(README.split())
