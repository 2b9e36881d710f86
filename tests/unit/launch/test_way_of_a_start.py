"""The way of a start, as launch/README.md lists it, names functions that exist, and is as short as it says."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "rlctl"
README = (PACKAGE / "launch/README.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)` (.*)$", README, re.MULTILINE)


def functions(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        found |= {node.name} if isinstance(node, ast.FunctionDef) else set()
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_each_function_on_the_way_exists() -> None:
    assert [f"{file}:{name}" for file, name, _ in STEPS if name not in functions(PACKAGE / file)] == []


def test_the_way_has_at_most_27_calls_down_and_3_up_as_counted() -> None:
    up = sum("This call goes up" in text for *_, text in STEPS)
    down = len(STEPS) - 1 - up
    assert (down, up) <= (27, 3)
    assert f"{down} calls go down and {up} go up." in " ".join(README.split())
