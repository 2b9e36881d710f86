"""`rlctl eval` and `rlctl export`: they refuse in one line before an engine starts, and show stored results."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.evaluation.store import EvaluationFolder
from rlctl.preflight.load import load
from rlctl.run.checkpoints import Checkpoints
from tests.unit.cli.conftest import Rlctl, write_run


def add_checkpoint(run: Path) -> Path:
    """Write a checkpoint of step 4 into a run. Return the run."""

    def write_export(path: Path) -> None:
        (path / "hf").mkdir()
        (path / "hf/config.json").write_text("{}")

    Checkpoints(run / "checkpoints", 1, 0).save(4, {}, write_export)
    return run


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "error: CHECKPOINT | FOLDER | RUN: is missing; rlctl runs list shows the runs\n"),
        (
            ["frist"],
            "error: frist: no run, no checkpoint, and no folder with config.json and weights; did you mean first?",
        ),
        (["grpo-tiny"], "error: grpo-tiny: a recipe, which has no weights; name a run, a checkpoint or a model\n"),
        (["model"], "error: model: belongs to no run: name a recipe too, whose data and rewards it is measured by\n"),
        (["first"], "error: runs/first: is a run without rewards: name a GRPO recipe too, whose data and rewards"),
        (["first", "--step", "3"], "error: runs/first has no checkpoint of step 3; there are 4\n"),
        (["first", "--compare", "a", "b"], "error: --compare: takes two results and nothing else\n"),
        (["--compare", "first", "first"], "error: first: first was not evaluated yet; rlctl eval first does it"),
        (["--rescore", "first"], "error: runs/first/rollouts.jsonl: no held-out answers of any step"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(rlctl: Rlctl, home: Path, arguments: list[str], error: str) -> None:
    add_checkpoint(write_run(home, "kind: sft\n"))
    done = rlctl("eval", *arguments)
    assert done.code == 2
    assert done.err.startswith(error)


def test_a_recipe_without_held_out_rows_asks_for_some(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("eval", "model", "grpo.recipe.yaml")
    assert done.code == 2
    assert "data.validation.path" in done.err
    assert "there is nothing to evaluate; name rows with --data PATH" in done.err


def make_evaluation(name: str, num_right: int) -> dict[str, Any]:
    """Return the result of an evaluation of 20 tasks."""
    tasks = []
    for number in range(20):
        is_right = number < num_right
        tasks.append({"task": f"r{number}", "scored": 1, "right": int(is_right), "reward": float(is_right)})
    settings = {"generations": 1, "temperature": 0.0, "max_new_tokens": 64, "scored_by": ["exact x 1"]}
    facts = {"target": name, "data": "validation", "rows": "r", "by_task": tasks, "figures": {"tasks": 20}}
    return {**settings, **facts}


def store_evaluation(folder: Path, evaluation: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    EvaluationFolder(folder).finish([], evaluation)


def test_two_results_are_compared_task_by_task(rlctl: Rlctl, home: Path) -> None:
    store_evaluation(home / "a", make_evaluation("a", 5))
    store_evaluation(home / "b", make_evaluation("b", 12))
    done = rlctl("eval", "--compare", "a", "b/result.json")
    assert done.code == 0
    assert "b minus a on validation\nboth: 1 answer each, greedy, at most 64 tokens\n" in done.out
    assert "+35.0 points" in done.out
    assert "p = 0.016 (exact): more than chance" in done.out
    assert "7 better, 0 worse, rest equal" in done.out
    comparison = json.loads(rlctl("eval", "--compare", "b", "a", "--json").out)
    assert comparison["accuracy"]["mean"] == pytest.approx(-0.35)
    assert comparison["accuracy"]["p_value"] == pytest.approx(2 / 2**7)


def test_answers_of_unequal_settings_are_compared_with_both_in_the_header(rlctl: Rlctl, home: Path) -> None:
    store_evaluation(home / "a", make_evaluation("a", 5))
    sampled = {**make_evaluation("b", 9), "generations": 4, "temperature": 1.0, "top_p": 0.9}
    store_evaluation(home / "b", sampled)
    store_evaluation(home / "c", {**make_evaluation("c", 9), "scored_by": ["mine.py:strict x 0.5"]})
    text = rlctl("eval", "--compare", "a", "b").out
    assert "B, b: 4 answers each, temperature 1, top_p 0.9, at most 64 tokens\nA, a: 1 answer each, greedy" in text
    assert "Settings differ (generations, temperature): the difference is that of models" in text
    text = rlctl("eval", "--compare", "a", "c").out
    assert "at most 64 tokens, scored by mine.py:strict x 0.5\n" in text and "differ (scored_by)" in text
    assert json.loads(rlctl("eval", "--compare", "a", "c", "--json").out)["unequal"] == ["scored_by"]


def test_a_run_stands_for_its_newest_evaluation_of_whatever_step(rlctl: Rlctl, home: Path) -> None:
    run = add_checkpoint(write_run(home, "kind: sft\n"))
    for seconds, step in enumerate((1, 3, 2)):
        folder = run / f"evals/step_{step}--validation--01234567"
        store_evaluation(folder, make_evaluation(f"first step {step}", step))
        os.utime(folder / "result.json", (seconds, seconds))
    store_evaluation(home / "evals/model--validation--01234567", make_evaluation("model", 9))
    assert "first step 2 minus model on validation" in rlctl("eval", "--compare", "model", "first").out
    done = rlctl("eval", "--compare", "model", "runs/first/checkpoints/step_4")
    assert done.err.startswith("error: runs/first/checkpoints/step_4: first step 4 was not evaluated yet")


REMEDY = "nothing is compared; the command that made the evaluation makes it again from its answers\n"


def test_an_evaluation_that_is_damaged_or_not_finished_is_not_compared(rlctl: Rlctl, home: Path) -> None:
    store_evaluation(home / "a", make_evaluation("a", 5))
    (home / "b/parts").mkdir(parents=True)
    done = rlctl("eval", "--compare", "a", "b")
    assert (done.code, done.err) == (
        2,
        "error: b: the evaluation is not finished; the same `rlctl eval` goes on with it\n",
    )
    (home / "a/result.json").write_text((home / "a/result.json").read_text().replace('"right": 1', '"right": 0'))
    done = rlctl("eval", "--compare", "a", "a")
    assert (done.code, done.err) == (2, "error: a/result.json: its bytes are not those that were written; " + REMEDY)


def test_an_export_says_what_is_in_its_way(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("export", "model", "model")
    assert (done.code, done.err) == (2, "error: model exists: name a folder that does not\n")
    done = rlctl("export", "me/model", "out")
    assert done.code == 2
    assert done.err.startswith(
        "error: me/model is not on this machine: only a checkpoint, a run, a folder, or a hub's model that was fetched "
        "before is exported"
    )


def test_a_run_of_another_version_names_what_measures_it(rlctl: Rlctl, home: Path) -> None:
    run = add_checkpoint(write_run(home, load("grpo", "grpo.recipe.yaml", ["run.name=first"]).to_yaml()))
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
    overrides = [
        "run.name=first",
        "validation.recipe=grpo.recipe.yaml",
        "validation.recipe.data.validation.path=train.jsonl",
    ]
    text = load("sft", "sft.recipe.yaml", overrides).to_yaml()
    add_checkpoint(write_run(home, text.replace("path: " + str(home / "train.jsonl"), "path: gone.jsonl")))
    done = rlctl("eval", "first")
    assert done.code == 2
    assert "config.yaml" in done.err and "data.validation.path: no file or folder gone.jsonl" in done.err
