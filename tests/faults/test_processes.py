"""A process of a run dies: an engine is replaced and nothing is lost, but a lost trainer ends the run with one line."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.runs import Run, in_transit, outcomes

pytestmark = pytest.mark.usefixtures("ordinary_workers")


@pytest.mark.long  # variant of test_async.py and test_resume.py, in one run
def test_an_engine_is_replaced_and_a_dead_trainer_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "hurt-processes", "grpo.num_steps=100000", "checkpoint.every=2")
    pids = run.wait_for_event("processes")
    run.wait_for_step(3)
    os.kill(pids["engine-0"], signal.SIGKILL)
    run.wait_for_event("engine_lost", engine=0)
    restarted = run.wait_for_event("engine_restarted", engine=0)
    run.wait_for_step(restarted["version"] + 3)

    os.kill(pids["trainer-0"], signal.SIGKILL)
    assert run.end() == 1
    assert "trainer-0 died during" in run.text()
    assert f"rlctl train grpo --resume {run.path}" in run.text()
    numbers = [record["step"] for record in run.steps()]
    assert numbers == list(range(1, len(numbers) + 1))
    ended = outcomes(run.path)
    assert all(len(set(steps)) == 1 for steps in ended.values())
    assert len(ended) == 8 * len(numbers)
    assert in_transit("hurt-processes") == []


@pytest.mark.long  # variant: a setting
def test_without_restarts_a_dead_engine_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "strict", "grpo.num_steps=100000", "generation.max_restarts=0", "checkpoint.every=0")
    pids = run.wait_for_event("processes")
    run.wait_for_step(2)
    os.kill(pids["engine-0"], signal.SIGKILL)
    assert run.end() == 1
    errors = [event["what"] for event in run.events("error")]
    assert len(errors) == 1
    assert "engine-0 died during" in errors[0]
    assert "generation.max_restarts" in errors[0]
