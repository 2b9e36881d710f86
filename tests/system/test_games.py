"""Games of several turns, by the recipes that ship: played, scored and trained on."""

from pathlib import Path

import pytest

from tests.faults.runs import Run, read


def accuracies(run: Run) -> list[float]:
    records = read(run.path / "metrics.jsonl")
    return [record["validation/accuracy"] for record in records if record["kind"] == "validation"]


@pytest.mark.long  # test_episodes.py has such a run
def test_two_steps_with_a_calculator_train_on_turns_that_called_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "calculator", "calculator-tiny", "grpo.num_steps=2", "validation.max_prompts=40")
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        # Some ask the tool, some do not; two or three turns, of which the last calls none.
        assert 2 < step["environment/turns"] <= 3
        assert step["environment/turns"] == pytest.approx(1 + step["environment/tool_calls"], abs=0.2)
        assert step["environment/failed"] == 0
        assert step["mismatch/token_mult_prob_error"] <= 1.001
    # The warm start is a poor player.
    assert accuracies(run)[0] <= 0.4


@pytest.mark.long  # a minute or two of training each
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["guess-tiny", "calculator-tiny"])
def test_a_game_is_learned_and_won_where_it_was_never_trained(tmp_path: Path, recipe: str, bound: int) -> None:
    # Run has settings for small steps; these are the recipe's own.
    sizes = ("grpo.num_prompts_per_step=32", "grpo.num_generations_per_prompt=8", "validation.every=10")
    mode = ("async.enabled=true", f"async.max_trajectory_age_steps={bound}") if bound else ()
    run = Run(tmp_path, recipe, recipe, *mode, *sizes)
    assert run.end() == 0, run.text()
    held_out = accuracies(run)
    assert held_out[0] <= 0.4
    assert held_out[-1] >= 0.9
