"""An SFT run that is validated by a GRPO recipe: real trainer, real vLLM, one refit before each validation."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import Run, in_transit, read, survivors
from tests.faults.test_resume import lasting_metrics
from tests.system.test_episodes import GUESS, tasks
from tests.system.test_eval import evaluate

RECIPE = ("validation.recipe=grpo-tiny", "checkpoint.metric=validation/accuracy", "checkpoint.export_dtype=auto")
FEW = (
    "validation.recipe.validation.max_prompts=10",
    "validation.recipe.validation.num_generations=2",
    "validation.recipe.validation.temperature=0.7",
)


def validations(run: Run) -> dict[int, dict[str, Any]]:
    """The record of each validation, by its step."""
    records = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    return {each["step"]: {name: value for name, value in each.items() if "validation/" in name} for each in records}


def test_answers_are_measured_beside_the_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, "sft", "sft.num_steps=2", "sft.batch_size=16", "validation.every=1", *RECIPE, *FEW, kind="sft")
    assert run.end() == 0, run.text()
    assert run.undeclared_metrics() == set()
    found = validations(run)
    assert [*found] == [0, 1, 2]
    for each in found.values():
        assert each["validation/samples"] == 200 and each["validation/prompts"] == 10
        assert 0 <= each["validation/accuracy"] <= each["validation/pass_at_k"] <= 1
    assert found[2]["validation/loss"] < found[0]["validation/loss"]
    state = json.loads((run.path / "checkpoints/step_2/state.json").read_text())
    assert state["score"] == found[2]["validation/accuracy"]
    kept = read(run.path / "rollouts.jsonl")
    assert {(each["step"], each["purpose"]) for each in kept} == {(step, "validation") for step in (0, 1, 2)}
    # Each answer is of the weights of its step.
    assert all([*one["versions"]] == [str(each["step"])] for each in kept for one in each["rollouts"])
    assert in_transit("sft") == []


@pytest.mark.long  # two runs of 200 steps, two evaluations
@pytest.mark.timeout(1800)
def test_accuracy_rises_and_neither_a_kill_nor_an_evaluation_gives_another_figure(tmp_path: Path) -> None:
    steps = ("sft.num_steps=200", "validation.every=100", "checkpoint.every=100", "checkpoint.keep_last=2")
    whole = Run(tmp_path, "whole-sft", *steps, *RECIPE, kind="sft")
    hurt = Run(tmp_path, "hurt-sft", *steps, *RECIPE, kind="sft")
    hurt.wait_for_step(130)
    assert survivors(hurt.kill()) == []
    hurt = Run(tmp_path, "hurt-sft", resume=True, kind="sft")
    assert hurt.start() == 100
    assert hurt.end() == 0, hurt.text()
    assert whole.end() == 0, whole.text()
    found = validations(whole)
    assert found == validations(hurt)
    assert [lasting_metrics(step) for step in hurt.steps()] == [lasting_metrics(step) for step in whole.steps()]
    name = "checkpoints/step_200/hf/model.safetensors"
    assert (hurt.path / name).read_bytes() == (whole.path / name).read_bytes()
    accuracies = [each["validation/accuracy"] for each in found.values()]
    assert accuracies[0] < 0.02 and accuracies[-1] > 0.05
    for step in (100, 200):
        checkpoint = str(whole.path / f"checkpoints/step_{step}")
        (named,) = evaluate(checkpoint, "grpo-tiny", "--to", str(tmp_path / "evals"), cwd=tmp_path)
        metrics = named["figures"]["metrics"]
        assert metrics == {name: found[step][name] for name in metrics}
    # The run's own recipe needs no name.
    (own,) = evaluate(checkpoint, cwd=tmp_path)
    assert own["figures"]["metrics"] == metrics
    assert in_transit("hurt-sft") == in_transit("whole-sft") == []


@pytest.mark.long  # a run, with a graph and a game
def test_episodes_of_a_recipe_are_played_beside_a_compiled_graph_and_ctrl_c_ends_clean(tmp_path: Path) -> None:
    rows = tasks(tmp_path, 12)
    game = [f"validation.recipe.{each}" for each in (*GUESS, f"data.validation.path={rows}", f"data.train.path={rows}")]
    graph = ("ray_compiled_graph.enabled=require", "sft.num_steps=100000", "validation.every=2")
    run = Run(tmp_path, "games", *graph, *RECIPE, *game, kind="sft")
    run.wait_for("three validations", lambda: len(validations(run)) >= 3)
    family = [run.wait_for_event("processes")[name] for name in ("trainer-0", "engine-0")]
    run.interrupt()
    assert run.end() == 130, run.text()
    assert all(not Path(f"/proc/{pid}").exists() for pid in family)
    for each in validations(run).values():
        assert each["validation/turns"] > 1 and each["validation/failed_episodes"] == 0
        assert each["validation/prompts"] == 12
    assert in_transit("games") == []
