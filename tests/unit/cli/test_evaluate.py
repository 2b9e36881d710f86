"""`rlctl eval` and `rlctl export`: what is refused before an engine starts, in one line; stored results shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.evaluation.store import EvaluationFolder
from rlctl.run.checkpoints import Checkpoints
from tests.unit.cli.conftest import Rlctl, write_run


def with_checkpoint(run: Path) -> Path:
    def write(path: Path) -> None:
        (path / "hf").mkdir()
        (path / "hf/config.json").write_text("{}")

    Checkpoints(run / "checkpoints", 1, 0).save(4, {}, write)
    return run


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "error: CHECKPOINT | FOLDER | RUN: is missing; rlctl runs list shows the runs\n"),
        (["frist"], "error: frist: no such run; did you mean first?; or a checkpoint, or a folder with config.json"),
        (["model"], "error: model: belongs to no run: name a recipe too, whose data and rewards it is measured by\n"),
        (["first"], "error: runs/first: is a run without rewards: name a GRPO recipe too, whose data and rewards"),
        (["first", "--step", "3"], "error: runs/first has no checkpoint of step 3; there are 4\n"),
        (["first", "--compare", "a", "b"], "error: --compare: takes two results and nothing else\n"),
        (["--compare", "first", "first"], "error: first: first step 4 was not evaluated yet; rlctl eval first does it"),
        (["--rescore", "first"], "error: runs/first/rollouts.jsonl: no held-out answers of any step"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(rlctl: Rlctl, home: Path, arguments: list[str], error: str) -> None:
    with_checkpoint(write_run(home, "kind: sft\n"))
    done = rlctl("eval", *arguments)
    assert done.code == 2
    assert done.err.startswith(error)


def test_a_recipe_without_held_out_rows_asks_for_some(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("eval", "model", "grpo.recipe.yaml")
    assert done.code == 2
    assert "data.validation.path" in done.err
    assert "there is nothing to evaluate; name rows with --data PATH" in done.err


def result(name: str, right: int) -> dict[str, Any]:
    tasks = [{"task": f"r{n}", "scored": 1, "right": int(n < right), "reward": float(n < right)} for n in range(20)]
    return {"target": name, "data": "validation", "rows": "r", "by_task": tasks, "figures": {"tasks": 20}}


def test_two_results_are_compared_task_by_task(rlctl: Rlctl, home: Path) -> None:
    for name, right in (("a", 5), ("b", 12)):
        folder = EvaluationFolder(home / name)
        folder.path.mkdir()
        folder.finish([], result(name, right))
    done = rlctl("eval", "--compare", "a", "b/result.json")
    assert done.code == 0
    assert "b minus a on validation" in done.out
    assert "+35.0 points" in done.out
    assert "p = 0.016: more than chance" in done.out
    assert "7 better, 0 worse, rest equal" in done.out
    found = json.loads(rlctl("eval", "--compare", "b", "a", "--json").out)
    assert found["accuracy"]["mean"] == pytest.approx(-0.35)
    assert found["accuracy"]["p_value"] == pytest.approx(2 / 2**7)


def test_an_export_says_what_is_in_its_way(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("export", "model", "model")
    assert (done.code, done.err) == (2, "error: model exists: name a folder that does not\n")
    done = rlctl("export", "me/model", "out")
    assert done.code == 2
    assert done.err.startswith(
        "error: me/model is not on this machine: only a checkpoint, a run or a folder is exported"
    )
