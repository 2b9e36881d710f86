"""Runs whose programs are tested in a sandbox: their record, and a kill that changes nothing."""

from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import Run
from tests.faults.test_resume import check_a_kill_changes_nothing

SETTINGS = (
    f"model.path={RECIPES / 'tiny/qwen3-code'}",
    f"data.train.path={RECIPES / 'tiny-data/code-train.jsonl'}",
    f"data.validation.path={RECIPES / 'tiny-data/code-validation.jsonl'}",
    "rewards=[python_tests]",
    "generation.max_new_tokens=32",
    "trainer.threads=1",
    "checkpoint.every=1",
    "checkpoint.keep_last=100",
)


def test_a_run_records_its_programs_and_repeats_none(tmp_path: Path) -> None:
    run = Run(tmp_path, "programs", *SETTINGS, "grpo.num_steps=2", "validation.every=0")
    assert run.end() == 0, run.text()
    assert run.undeclared_metrics() == set()
    assert "sandbox" in run.text()
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001
        assert step["reward/failed"] == 0 and step["programs/scored"] >= step["programs/sandboxes"] > 0
        assert 0 <= step["programs/cached"] < 1 and step["programs/limit/cpu"] == 0
        assert step["programs/sandbox_seconds"] > 0 and step["programs/per_second"] > 0
    assert sum(step["reward/mean"] for step in run.steps()) > 0


@pytest.mark.long  # two runs and a resume
def test_a_killed_run_of_programs_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    check_a_kill_changes_nothing(tmp_path, (*SETTINGS, "grpo.num_steps=4"), 4)
