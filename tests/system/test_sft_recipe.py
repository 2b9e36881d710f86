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
    """Return the metrics of each validation, by its step."""
    metrics = {}
    for record in read(run.path / "metrics.jsonl"):
        if record["kind"] == "validation":
            metrics[record["step"]] = {name: metric for name, metric in record.items() if "validation/" in name}
    return metrics


def test_answers_are_measured_beside_the_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, "sft", "sft.num_steps=2", "sft.batch_size=16", "validation.every=1", *RECIPE, *FEW, kind="sft")
    assert run.end() == 0, run.text()
    assert run.undeclared_metrics() == set()
    metrics = validations(run)
    assert [*metrics] == [0, 1, 2]
    for step_metrics in metrics.values():
        assert step_metrics["validation/samples"] == 200 and step_metrics["validation/prompts"] == 10
        assert 0 <= step_metrics["validation/accuracy"] <= step_metrics["validation/pass_at_k"] <= 1
    assert metrics[2]["validation/loss"] < metrics[0]["validation/loss"]
    state = json.loads((run.path / "checkpoints/step_2/state.json").read_text())
    assert state["score"] == metrics[2]["validation/accuracy"]
    groups = read(run.path / "rollouts.jsonl")
    assert {(group["step"], group["purpose"]) for group in groups} == {(step, "validation") for step in (0, 1, 2)}
    for group in groups:
        # Each answer is of the weights of its step.
        assert all([*rollout["versions"]] == [str(group["step"])] for rollout in group["rollouts"])
    assert in_transit("sft") == []


@pytest.mark.long  # two runs of 200 steps, two evaluations
@pytest.mark.timeout(1800)
def test_accuracy_rises_and_neither_a_kill_nor_an_evaluation_gives_another_figure(tmp_path: Path) -> None:
    steps = ("sft.num_steps=200", "validation.every=100", "checkpoint.every=100", "checkpoint.keep_last=2")
    unhurt = Run(tmp_path, "whole-sft", *steps, *RECIPE, kind="sft")
    hurt = Run(tmp_path, "hurt-sft", *steps, *RECIPE, kind="sft")
    hurt.wait_for_step(130)
    assert survivors(hurt.kill()) == []
    hurt = Run(tmp_path, "hurt-sft", resume=True, kind="sft")
    assert hurt.start() == 100
    assert hurt.end() == 0, hurt.text()
    assert unhurt.end() == 0, unhurt.text()
    expected = validations(unhurt)
    assert validations(hurt) == expected
    assert [lasting_metrics(step) for step in hurt.steps()] == [lasting_metrics(step) for step in unhurt.steps()]
    weights_file = "checkpoints/step_200/hf/model.safetensors"
    assert (hurt.path / weights_file).read_bytes() == (unhurt.path / weights_file).read_bytes()
    accuracies = [step_metrics["validation/accuracy"] for step_metrics in expected.values()]
    assert accuracies[0] < 0.02 and accuracies[-1] > 0.05
    for step in (100, 200):
        checkpoint = str(unhurt.path / f"checkpoints/step_{step}")
        (evaluation,) = evaluate(checkpoint, "grpo-tiny", "--to", str(tmp_path / "evals"), cwd=tmp_path)
        metrics = evaluation["figures"]["metrics"]
        assert metrics == {name: expected[step][name] for name in metrics}
    # The run's own recipe needs no name.
    (evaluation,) = evaluate(checkpoint, cwd=tmp_path)
    assert evaluation["figures"]["metrics"] == metrics
    assert in_transit("hurt-sft") == in_transit("whole-sft") == []


@pytest.mark.long  # a run, with a graph and a game
def test_episodes_of_a_recipe_are_played_beside_a_compiled_graph_and_ctrl_c_ends_clean(tmp_path: Path) -> None:
    rows = tasks(tmp_path, 12)
    game_settings = (*GUESS, f"data.validation.path={rows}", f"data.train.path={rows}")
    settings = [f"validation.recipe.{setting}" for setting in game_settings]
    settings += ["ray_compiled_graph.enabled=require", "sft.num_steps=100000", "validation.every=2"]
    run = Run(tmp_path, "games", *RECIPE, *settings, kind="sft")
    run.wait_for("three validations", lambda: len(validations(run)) >= 3)
    worker_pids = [run.wait_for_event("processes")[name] for name in ("trainer-0", "engine-0")]
    run.interrupt()
    assert run.end() == 130, run.text()
    assert all(not Path(f"/proc/{pid}").exists() for pid in worker_pids)
    for step_metrics in validations(run).values():
        assert step_metrics["validation/turns"] > 1 and step_metrics["validation/failed_episodes"] == 0
        assert step_metrics["validation/prompts"] == 12
    assert in_transit("games") == []
