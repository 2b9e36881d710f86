"""Whole runs of agents: the shipped recipe trains what it sampled, and a killed run goes on bit for bit."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.faults.test_resume import check_a_kill_changes_nothing
from tests.system.test_eval import evaluate
from tests.system.test_games import accuracies

RECIPE = "calculator-agent-tiny"


def test_two_steps_of_an_agent_train_one_row_an_episode(tmp_path: Path) -> None:
    run = Run(tmp_path, "agent", RECIPE, WITHOUT_VLLM, "grpo.num_steps=2", "validation.every=0")
    assert run.end() == 0, run.text()
    assert run.undeclared_metrics() == set()
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001
        assert (step["agent/rows_per_episode"], step["environment/failed"]) == (1, 0)
        assert 1 < step["environment/turns"] <= 4


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = (RECIPE, "grpo.num_steps=3", "checkpoint={every: 1, keep_last: 100}", "validation.every=0")
    check_a_kill_changes_nothing(tmp_path, settings, last=3)


@pytest.mark.long
@pytest.mark.parametrize("as_command", [False, True], ids=["function", "command"])
def test_an_agent_is_evaluated_on_held_out_tasks(tmp_path: Path, as_command: bool) -> None:
    recipe = tmp_path / "mine.yaml"
    command = shlex.join([sys.executable, str(RECIPES / "agents/command_line.py")])
    agent = f"agent: {{name: null, command: {json.dumps(command)}}}\n" if as_command else ""
    recipe.write_text(f"defaults: {RECIPE}\n{agent}validation: {{max_prompts: 12, temperature: 1.0}}\n")
    (evaluation,) = evaluate(str(RECIPES / "tiny/qwen3-games"), str(recipe), cwd=tmp_path)
    metrics = evaluation["figures"]["metrics"]
    assert (metrics["validation/failed_episodes"], metrics["validation/prompts"]) == (0, 12)
    assert metrics["validation/turns"] > 1 and metrics["validation/accuracy"] < 0.5


@pytest.mark.long
def test_the_recipe_learns(tmp_path: Path) -> None:
    run = Run(tmp_path, "agent", RECIPE)
    assert run.end() == 0, run.text()
    first, *_, last = accuracies(run)
    assert first < 0.1 and last >= 0.9
