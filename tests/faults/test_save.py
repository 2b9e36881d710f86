"""A run killed while it writes a checkpoint during training resumes from the checkpoint before, bit by bit."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import Run, survivors

SETTINGS = ("sft.num_steps=12", "checkpoint.every=2", "checkpoint.keep_last=100", "validation.every=0")


def stop_the_rank_while_it_writes(run: Run, rank: int) -> Path:
    """Stop the rank while its thread writes a checkpoint. Return the folder of the incomplete checkpoint."""
    folder = run.path / "checkpoints"
    earlier_folders = set[Path]()
    while True:
        assert run.process.poll() is None, run.text()
        for temporary in set(folder.glob("tmp_step_*")) - earlier_folders:
            os.kill(rank, signal.SIGSTOP)
            earlier_folders.add(temporary)
            time.sleep(0.5)
            if temporary.exists():
                return temporary
            # The rank had already written everything, so let it go on and try the next checkpoint.
            os.kill(rank, signal.SIGCONT)


@pytest.mark.long  # three runs; the parts: tests/unit/run/test_recorder.py and test_checkpoints.py
def test_a_kill_while_a_checkpoint_is_written_loses_only_the_steps_since_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path, "hurt", *SETTINGS, kind="sft")
    rank = run.wait_for_event("processes")["trainer-0"]
    run.wait_for_event("checkpoint", step=2)
    unfinished = stop_the_rank_while_it_writes(run, rank)
    step = int(unfinished.name.removeprefix("tmp_step_"))
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.kill()
    assert survivors(family) == []
    assert unfinished.exists() and not unfinished.with_name(f"step_{step}").exists()

    resumed = Run(tmp_path, "hurt", resume=True, kind="sft")
    assert resumed.start() == step - 2
    assert resumed.end() == 0, resumed.text()
    assert not unfinished.exists()
    unhurt = Run(tmp_path, "unhurt", *SETTINGS, kind="sft")
    assert unhurt.end() == 0, unhurt.text()
    assert [record["step"] for record in resumed.steps()] == list(range(1, 13))
    weights = "checkpoints/step_12/hf/model.safetensors"
    assert (resumed.path / weights).read_bytes() == (unhurt.path / weights).read_bytes()
