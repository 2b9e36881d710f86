"""A run that loses its trainer restarts by itself, up to a limit, and ends as if nothing had happened."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.runs import Run

pytestmark = pytest.mark.usefixtures("ordinary_workers")

STEPS = 60


def damage_the_newest(checkpoints: Path) -> int:
    """Empty a file of the newest checkpoint while the trainer is stopped. Return the checkpoint's step."""
    # A folder that the trainer has written may still get its final name.
    time.sleep(1)
    newest = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    (checkpoints / f"step_{newest}/state.json").write_text("")
    return newest


@pytest.mark.long  # two starts of a run
@pytest.mark.timeout(900)
def test_a_lost_trainer_is_started_again_and_one_loss_too_many_ends_the_run(tmp_path: Path) -> None:
    settings = (f"sft.num_steps={STEPS}", "checkpoint.every=2", "run.max_restarts=1", "run.restart_backoff_s=0.1")
    run = Run(tmp_path, "restarted", *settings, "validation.every=0", kind="sft")
    run.wait_for_event("checkpoint", step=4)
    trainer = run.wait_for_event("processes")["trainer-0"]
    os.kill(trainer, signal.SIGSTOP)
    damaged_step = damage_the_newest(run.path / "checkpoints")
    os.kill(trainer, signal.SIGKILL)
    restart = run.wait_for_event("restart")
    assert (restart["count"], restart["pause_s"]) == ("1 of 1", 0.1)
    assert "trainer-0 died during" in restart["reason"]
    start = run.wait_for_event("run_started", attempt=2)
    assert start["start_step"] == damaged_step - 2
    assert f"step_{damaged_step}/state.json: empty, of" in run.wait_for_event("warning")["what"]
    run.wait_for_event("phase", step=STEPS - 10)
    assert [record["step"] for record in run.steps()][: STEPS - 11] == list(range(1, STEPS - 10))
    os.kill(run.events("processes")[-1]["trainer-0"], signal.SIGKILL)
    assert run.end() == 1
    assert run.events()[-1]["status"] == "failed"
    assert "trainer-0 died during" in run.text()
