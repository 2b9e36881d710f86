"""Code says what its values are, one thing a line; the ceilings of each folder only fall."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.plain import UNITS, Measure, measure

ROOT = Path(__file__).parents[2]
CEILINGS_FILE = Path(__file__).with_suffix(".json")
CEILINGS: dict[str, dict[str, float]] = json.loads(CEILINGS_FILE.read_text())
GOALS = {
    "rlctl": dict(zip(UNITS, (1, 30, 3, 2, 10, 2, 0, 10, 4), strict=True)),
    "tests": dict(zip(UNITS, (2, 30, 3, 5, 10, 4, 0, 10, 4), strict=True)),
}
_SHOWN = 8
HABITS = """
def told(x, each):
    a, b = x, each
    c = d = e, f, g = [1], [2], [3]
    if (found := x) and found:
        print(found)
    print(size := 3, [i for i in x for j in i], [each] * (x > 3))
    return [*x, *each, *a] if b else c
"""


@cache
def figures_of(part: str) -> Measure:
    return measure(sorted((ROOT / part).rglob("*.py")), ROOT)


def parts() -> list[str]:
    """Return both trees and the folders of rlctl."""
    folders = sorted(path.parent for path in (ROOT / "rlctl").glob("*/__init__.py"))
    return ["rlctl", "tests", *(str(folder.relative_to(ROOT)) for folder in folders)]


def test_each_folder_has_ceilings() -> None:
    assert list(CEILINGS) == parts()


@pytest.mark.parametrize("part", CEILINGS)
def test_the_code_of_a_part_is_within_its_ceilings(part: str) -> None:
    figures = figures_of(part)
    for figure, ceiling in CEILINGS[part].items():
        examples = "\n".join(figures.examples(figure, _SHOWN))
        message = f"{figure} of {part}: {figures.value(figure):.1f}, at most {ceiling}"
        assert figures.value(figure) <= ceiling + 0.05, f"{message}\n{examples}"


def test_each_habit_is_counted_where_it_is_and_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(HABITS)
    figures = measure([file], tmp_path)
    assert dict(figures.counts) == {
        "vague": 2,
        "filler": 10,
        "tuples": 1,
        "walruses": 1,
        "nested": 1,
        "arithmetic": 1,
        "dense": 1,
        "mute": 1,
    }
    assert (figures.lines, figures.names) == (7, 13)
    assert figures.examples("mute", 3) == ["x.py:2: told"]
    assert figures.examples("tuples", 3) == ["x.py:3: a, b = (x, each)"]


def lower_ceilings() -> None:
    """Write today's figures as ceilings, at least the goals: `python -m tests.unit.test_plain`."""
    ceilings = {}
    for part in parts():
        figures = figures_of(part)
        goals = GOALS["tests" if part == "tests" else "rlctl"]
        ceilings[part] = {figure: max(goal, round(figures.value(figure), 1)) for figure, goal in goals.items()}
    CEILINGS_FILE.write_text(json.dumps(ceilings, indent=1) + "\n")


if __name__ == "__main__":
    lower_ceilings()
