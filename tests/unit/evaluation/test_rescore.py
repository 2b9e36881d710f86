"""Stored answers are scored only if every answer is there, unchanged; each counts once."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.evaluation.rescore import find_answers
from rlctl.evaluation.store import EvaluationError, EvaluationFolder


def group(task: str, step: int = 0, text: str = "x") -> dict[str, Any]:
    head = {"kind": "group", "step": step, "purpose": "validation", "task": task, "prompt": "?", "answer": "2"}
    return {**head, "rollouts": [{"index": 0, "text": [[text, True]], "tokens": 1, "finish": "stop"}]}


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(root: Path, groups: list[dict[str, Any]], prompts: int) -> Path:
    folder = root / "sums"
    folder.mkdir()
    (folder / "config.yaml").write_text("kind: grpo\ntelemetry: {groups_per_validation: 8}\n")
    write(folder / "metrics.jsonl", [{"kind": "validation", "step": 0, "time": 1.0, "validation/prompts": prompts}])
    write(folder / "rollouts.jsonl", groups)
    return folder


def test_answers_of_a_damaged_evaluation_are_refused_with_the_path(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "one")
    folder.path.mkdir()
    facts = {"target": "t", "data": "d", "step": 4, "temperature": 0.0, "max_new_tokens": 8, "seed": 0}
    result = {**facts, "rows": "r", "by_task": [{}], "figures": {"tasks": 1}}
    folder.finish([group(f"r{number}") for number in range(10)], result)
    assert len(find_answers(folder.path, tmp_path, None).groups) == 10
    file = folder.path / "rollouts.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(EvaluationError, match=r"one/rollouts\.jsonl: cut to .*; nothing is scored; the command"):
        find_answers(file, tmp_path, None)


def test_answers_that_a_run_has_lost_are_counted(tmp_path: Path) -> None:
    folder = run(tmp_path, [group("r0"), group("r1"), group("r2")], 200)
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write('{"kind": "group", "step": 0, "purp\n')
    missing = find_answers(folder, tmp_path, None).missing
    assert missing == f"{folder}/rollouts.jsonl: 3 of the 8 tasks recorded at step 0 are there; 1 damaged line"


def test_an_answer_that_was_recorded_again_counts_once(tmp_path: Path) -> None:
    """Runs of earlier versions of rlctl recorded step 0 again after a resume."""
    twice = [group("r0", text="old"), group("r1"), group("r0", text="new"), group("r0", step=4)]
    answers = find_answers(run(tmp_path, twice, 2), tmp_path, 0)
    assert [record["task"] for record in answers.groups] == ["r1", "r0"]
    assert answers.groups[1]["rollouts"][0]["text"] == [["new", True]] and answers.missing == ""


def test_a_validation_of_fewer_tasks_than_are_recorded_lacks_none(tmp_path: Path) -> None:
    assert find_answers(run(tmp_path, [group("r0"), group("r1")], 2), tmp_path, None).missing == ""
