"""A tracker that keeps metrics and rollouts of a run in one SQLite file, for queries."""

import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLES = """
create table if not exists metrics (kind, step, name, value, primary key (kind, step, name));
create table if not exists rollouts (purpose, step, task, number, text, reward,
    primary key (purpose, step, task, number));
"""
WORST = "select step, task, text, reward from rollouts where reward is not null order by reward, step desc limit 5"


class SqliteTracker:
    """Writer of the tables. A resumed run repeats steps: they replace those of before."""

    def __init__(self, run: Path, config: Mapping[str, Any], file: str = "run.sqlite") -> None:
        self._connection = sqlite3.connect(run / file, isolation_level=None, check_same_thread=False)
        self._connection.executescript(TABLES)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        rows = [(kind, step, name, number) for name, number in metrics.items()]
        self._connection.executemany("replace into metrics values (?, ?, ?, ?)", rows)

    def samples(self, purpose: str, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        rows = []
        for group in groups:
            for rollout in group["rollouts"]:
                text = "".join(part for part, _ in rollout["text"])
                rows.append((purpose, step, group["task"], rollout["index"], text, rollout["reward"]))
        self._connection.executemany("replace into rollouts values (?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        self._connection.close()


if __name__ == "__main__":
    for row in sqlite3.connect(sys.argv[1]).execute(WORST):
        print(*row, sep="\t")
