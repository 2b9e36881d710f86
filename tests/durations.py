"""Seconds that tests take, recorded by `make test ARGS=--record-durations` and kept in durations.json.

The suite begins the longest files first, so that no process is left alone with one at the end. Tests that took two
seconds are marked `slow`, and `make quick` leaves them out. The table of the ten slowest files in README.md is made
from the same numbers: `python -m tests.durations`.
"""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE / "durations.json"
README = HERE / "README.md"
# Files that take less time are not recorded, because their order does not matter.
SHORTEST_FILE_S = 1.0
SLOW_TEST_S = 2.0
SLOWEST_FILES = 10
HEAD = "| file | seconds |\n| --- | --- |\n"


def file_of(test: str) -> str:
    """Return the path of a test's file, relative to the repository. test: pytest's node id."""
    return test.partition("::")[0]


@cache
def load() -> dict[str, dict[str, float]]:
    """Return the recorded seconds by path under `files`, and by node id of slow tests under `tests`."""
    recorded: dict[str, dict[str, float]] = json.loads(FILE.read_text())
    return recorded


def save(seconds: Counter[str]) -> None:
    """Record the seconds of a session's tests, longest first."""
    files = Counter[str]()
    for test, spent in seconds.items():
        files[file_of(test)] += spent
    recorded = {"files": at_least(files, SHORTEST_FILE_S), "tests": at_least(seconds, SLOW_TEST_S)}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


def at_least(seconds: Counter[str], shortest: float) -> Mapping[str, float]:
    return {name: round(spent, 1) for name, spent in seconds.most_common() if spent >= shortest}


def table() -> str:
    """Return the table of the slowest files for README.md, as Markdown."""
    slowest = list(load()["files"].items())[:SLOWEST_FILES]
    rows = [f"| `{file.removeprefix('tests/')}` | {spent:.0f} |\n" for file, spent in slowest]
    return HEAD + "".join(rows)


def replace_table() -> None:
    """Write the current table of the slowest files into README.md."""
    before, _, rest = README.read_text().partition(HEAD)
    rows = rest.splitlines(keepends=True)
    first_other = next(index for index, row in enumerate(rows) if not row.startswith("|"))
    after = "".join(rows[first_other:])
    README.write_text(before + table() + after)


if __name__ == "__main__":
    replace_table()
