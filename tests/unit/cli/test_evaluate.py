"""`rlctl eval` and `rlctl export`: what is refused before an engine starts, in one line; stored results shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.evaluation.store import EvaluationFolder
from rlctl.preflight.load import load
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


def test_a_run_of_another_version_names_what_measures_it(rlctl: Rlctl, home: Path) -> None:
    run = with_checkpoint(write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml()))
    written = yaml.safe_load((run / "config.yaml").read_text())
    older = {key: value for key, value in written.items() if key != "environment"}
    other = {**written, "generation": {**written["generation"], "prefix_cache": 1}}
    for config, sign in ((older, "no environment"), (other, "generation.prefix_cache, which this version has not")):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        remedies = {
            ("eval", "first"): "name a recipe that measures it: rlctl eval first RECIPE",
            ("eval", "--rescore", "first"): "name a recipe that measures it: rlctl eval --rescore first RECIPE",
            ("chat", "first"): "name its weights alone: runs/first/checkpoints/step_4/hf",
        }
        rollouts = '{"kind": "group", "step": 4, "purpose": "validation", "task": "r0", "prompt": "", "rollouts": []}\n'
        (run / "rollouts.jsonl").write_text(rollouts)
        for command, remedy in remedies.items():
            done = rlctl(*command)
            assert done.code == 2
            assert f"the run is of another version of rlctl (its config has {sign}); {remedy}\n" in done.err
        assert "another version" not in rlctl("eval", "first", "grpo.recipe.yaml").err


def test_an_sft_run_is_measured_by_the_recipe_that_it_names(rlctl: Rlctl, home: Path) -> None:
    named = [
        "run.name=first",
        "validation.recipe=grpo.recipe.yaml",
        "validation.recipe.data.validation.path=train.jsonl",
    ]
    text = load("sft", "sft.recipe.yaml", ["run.name=first", *named]).to_yaml()
    with_checkpoint(write_run(home, text.replace("path: " + str(home / "train.jsonl"), "path: gone.jsonl")))
    done = rlctl("eval", "first")
    assert done.code == 2
    assert "config.yaml" in done.err and "data.validation.path: no file or folder gone.jsonl" in done.err
