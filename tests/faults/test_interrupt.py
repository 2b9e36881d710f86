"""Ctrl-C before there is anything to save; during steps: test_resume.py."""

from pathlib import Path

import pytest

from tests.faults.runs import Run


@pytest.mark.long  # variant: the moment
@pytest.mark.slow
def test_during_start_up_one_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, "early", "grpo.num_steps=100000")
    run.wait_for_event("startup", what="ray")
    run.interrupt()
    assert run.end() == 130
    assert run.steps() == []
