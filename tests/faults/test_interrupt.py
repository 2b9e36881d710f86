"""Ctrl-C: the first finishes the step and saves, the second stops at once; either leaves no process behind."""

import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import Run, in_transit, survivors


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_one_saves_and_two_stop_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "stopped", "grpo.num_steps=100000", "checkpoint.every=0")
    run.wait_for_step(3)
    second = Run(tmp_path, "stopped", resume=True)
    assert second.end() == 2
    assert f"is still running (process {run.process.pid})" in second.text()
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.interrupt()
    assert run.end() == 130
    assert survivors(family) == []
    done = len(run.steps())
    assert (run.path / "checkpoints" / f"step_{done}" / "state.json").exists()
    assert f"rlctl train grpo --resume {run.path}" in run.text()

    run = Run(tmp_path, "stopped", resume=True)
    run.wait_for_step(done + 2)
    family = psutil.Process(run.process.pid).children(recursive=True)
    begin = time.monotonic()
    run.interrupt()
    run.wait_for_event("warning")
    run.interrupt()
    assert run.end() == 130
    assert time.monotonic() - begin < 10
    assert survivors(family) == []
    assert in_transit("stopped") == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_during_start_up_one_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, "early", "grpo.num_steps=100000")
    run.wait_for_event("startup", what="ray")
    run.interrupt()
    assert run.end() == 130
    assert run.steps() == []
