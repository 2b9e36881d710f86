"""A run on tasks that reasoning-gym makes is killed and goes on with the same rows, bit for bit."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import Run, read
from tests.faults.test_resume import check_same_runs

SETTINGS = (
    f"model.path={RECIPES / 'tiny/qwen3-games'}",
    "model.random_init=true",
    "data.train={path: 'reasoning_gym:chain_sum', args: {seed: 1, size: 40, max_digits: 1}}",
    "data.validation={path: 'reasoning_gym:chain_sum', args: {seed: 100, size: 4, max_digits: 1}}",
    "rewards=[{name: reasoning_gym}]",
    "generation.max_new_tokens=8",
    "checkpoint={every: 1, keep_last: 100}",
    "grpo.num_steps=4",
)


@pytest.mark.long  # two runs and a resume
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'rlctl[reasoning-gym]'")
def test_a_killed_run_finds_the_rows_of_its_checkpoint_again(tmp_path: Path) -> None:
    unhurt = Run(tmp_path, "unhurt", *SETTINGS)
    assert unhurt.end() == 0, unhurt.text()
    for step in unhurt.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001 and step["reward/reasoning_gym/failed"] == 0
    groups = [record for record in read(unhurt.path / "rollouts.jsonl") if record["kind"] == "group"]
    assert groups and all("State the final answer" in group["prompt"] for group in groups)
    run = Run(tmp_path, "killed", *SETTINGS)
    run.wait_for_step(3)
    run.kill()
    resumed = Run(tmp_path, "killed", resume=True)
    assert resumed.end() == 0, resumed.text()
    check_same_runs(resumed, unhurt, 4)
    with_other_rows = Run(tmp_path, "killed", "data.train.args.seed=2", resume=True)
    assert with_other_rows.end() == 2 and "data.train.args" in with_other_rows.text()
