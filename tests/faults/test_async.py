"""An asynchronous run whose processes are killed keeps two contracts: no group is too old, none is lost or repeated."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, in_transit, outcomes, survivors

# Number of kills in the long tests. To test more: `RLCTL_TEST_KILLS=10 make test ARGS='tests/faults -m long'`.
KILLS = int(os.environ.get("RLCTL_TEST_KILLS", "3"))
PROMPTS = 8
AGE = 2
ROWS = 2300
SETTINGS = (
    "async.enabled=true", f"async.max_trajectory_age_steps={AGE}", "generation.max_restarts=20",
    # A group at a time, and small packs: the trainer waits, and trains steps in parts.
    "generation.forced_lengths=[8, 1.0]", "generation.max_num_seqs=8", "trainer.micro_batch_tokens=64",
    "health.parity_every=2",
)  # fmt: skip
CHECKPOINTS = ("checkpoint.every=2", "validation.every=0")


def wait_some_steps(run: Run, moments: random.Random, last: int) -> None:
    done = max((step["step"] for step in run.steps()), default=0)
    run.wait_for_step(min(last, done + moments.randint(1, 3)))
    time.sleep(moments.uniform(0, 0.5))


def kill_the_engine(run: Run) -> None:
    """Kill the engine and wait until the run has another one."""
    os.kill(run.wait_for_event("processes")["engine-0"], signal.SIGKILL)
    run.wait_for_event("engine_restarted", engine=0)


def stop_and_check_the_save(run: Run) -> None:
    family = psutil.Process(run.process.pid).children(recursive=True)
    command = [sys.executable, "-m", "rlctl", "runs", "stop", str(run.path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert output == f"hurt-async ends after its step, and is saved; watch: rlctl runs dash {run.path}\n"
    assert run.end() == 130
    # A stop is called one, everywhere.
    text = run.text()
    assert "asked to stop: finishing this step and saving; again: stop now" in text and "hurt-async stopped" in text
    assert "Ctrl-C" not in text and "interrupted" not in text
    assert run.wait_for_event("run_ended")["status"] == "stopped"
    assert survivors(family) == []
    assert (run.path / "checkpoints" / f"step_{len(run.steps())}" / "state.json").exists()
    assert f"rlctl train grpo --resume {run.path}" in run.text()


def test_a_killed_engine_and_a_resume_after_a_stop_break_neither(tmp_path: Path) -> None:
    # More steps than any machine makes before the stop.
    endless = 2000
    settings = (*SETTINGS, f"grpo.num_steps={endless}", "checkpoint.every=0", "validation.every=0")
    run = Run(tmp_path, "hurt-async", *settings)
    wait_some_steps(run, random.Random(11), endless)
    kill_the_engine(run)
    stop_and_check_the_save(run)
    last = len(run.steps()) + 10
    run = Run(tmp_path, "hurt-async", f"grpo.num_steps={last}", resume=True)
    assert run.end() == 0, run.text()
    check_both_contracts(run, last)


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_engine_and_driver_killed_again_and_again(tmp_path: Path) -> None:
    last = 10 * KILLS
    moments = random.Random(11)
    run = Run(tmp_path, "hurt-async", *SETTINGS, *CHECKPOINTS, f"grpo.num_steps={last}")
    for attempt in range(KILLS):
        wait_some_steps(run, moments, last)
        if attempt % 2 == 0:
            kill_the_engine(run)
        else:
            assert survivors(run.kill()) == []
            run = Run(tmp_path, "hurt-async", resume=True)
    assert run.end() == 0, run.text()
    check_both_contracts(run, last)


def check_both_contracts(run: Run, last: int) -> None:
    """Check both contracts: no group is trained above the age bound, and every drawn prompt ends exactly once."""
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    assert all(step["age/max"] <= AGE for step in steps)
    # Trainer and engine agree under equal weights, also on tokens of older ones.
    parity = {step["step"]: step["mismatch/parity"] for step in steps if "mismatch/parity" in step}
    assert list(parity) == list(range(2, last + 1, 2))
    assert max(parity.values()) < 1.0001
    assert max(step["age/max"] for step in steps) > 0
    assert max(step["train/parts"] for step in steps) > 1
    assert all(sum(step[f"buffer/age_{age}"] for age in range(AGE + 1)) <= (AGE + 1) * PROMPTS for step in steps)
    # Older tokens are further from the trained weights; the newest only where their answer's cache has older ones.
    fresh = [step["mismatch/age_0"] for step in steps if "mismatch/age_0" in step and not step["age/mixed"]]
    assert fresh and all(1 <= mismatch < 1.0001 for mismatch in fresh)
    assert fmean(fresh) < fmean(step["mismatch/age_1"] for step in steps if "mismatch/age_1" in step)
    assert fmean(step["mismatch/age_0"] for step in steps if "mismatch/age_0" in step) >= 1
    ended = outcomes(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    drawn = Cursor(ROWS, 0, True).draw(last * PROMPTS)
    assert set(ended) == {f"e{draw.epoch}-r{draw.row}" for draw in drawn}
    assert in_transit("hurt-async") == []
