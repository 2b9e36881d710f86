"""Faults while the trainer is called through a compiled graph: a clear end within seconds, no process left."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import Run, survivors
from tests.waiting import PATIENCE_S

COMPILED = ("ray_compiled_graph.enabled=require", "checkpoint.every=0", "validation.every=0")


@pytest.mark.long  # combination: the faults through a graph
def test_a_killed_worker_and_a_killed_driver(tmp_path: Path) -> None:
    run = Run(tmp_path, "graph", "sft.num_steps=100000", *COMPILED, kind="sft")
    pids = run.wait_for_event("processes")
    assert " ms a call, ordinary " in run.wait_for_event("dispatch")["what"]
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    time_of_kill = time.monotonic()
    os.kill(pids["trainer-0"], signal.SIGKILL)
    run.wait_for_event("error")
    assert time.monotonic() - time_of_kill < PATIENCE_S
    assert run.end() == 1
    assert "trainer-0 died during train" in run.text()
    assert survivors(family) == []

    run = Run(tmp_path, "graph", resume=True, kind="sft")
    run.wait_for_step(2)
    assert survivors(run.kill()) == []


@pytest.mark.long  # combination: a closed terminal, the dashboard, a graph
def test_a_closed_terminal_saves_and_ends_without_noise(tmp_path: Path) -> None:
    run = Run(tmp_path, "graph", "sft.num_steps=100000", *COMPILED, kind="sft", terminal=True)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.hang_up()
    assert run.end() == 130
    assert survivors(family) == []
    assert "Traceback" not in run.text()
    done = len(run.steps())
    assert (run.path / "checkpoints" / f"step_{done}" / "state.json").exists()
