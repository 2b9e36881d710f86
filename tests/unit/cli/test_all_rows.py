"""Every row's own answer is scored, and rows whose answer is not right are named."""

import json
from pathlib import Path

from tests.unit.cli.conftest import Rlctl

ROWS = [
    {"prompt": "1+1=", "answer": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]},
    {"prompt": "2+1=", "answer": "def f(x): return x", "test_list": ["assert f(1) == 2"]},
    {"prompt": "3+1=", "answer": "def f(x): return x", "test_list": []},
    {"prompt": "4+1=", "test_list": ["assert f(1) == 2"]},
]


def test_rows_without_a_right_answer_are_named(rlctl: Rlctl, home: Path) -> None:
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = "defaults: grpo-tiny.yaml\ndata: {train: {path: rows.jsonl}}\nrewards: [python_tests]\n"
    (home / "mine.yaml").write_text(recipe)
    done = rlctl("config", "check", "mine.yaml", "--all-rows")
    assert done.code == 0
    text = " ".join((done.out + done.err).split())
    path = home / "rows.jsonl"
    assert f"rewards: right answers in 1 of 4 rows of {path}" in text
    assert f"rewards: another answer, rows 1: {path}:2 " in text
    assert f"rewards: no score, rows 1: {path}:3: python_tests: no tests: the row's list of tests is empty" in text
    assert "rewards: no answer, rows 1 (data.train.answer_key)" in text
