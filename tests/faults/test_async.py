"""An asynchronous run whose processes are killed keeps its two contracts: nobody too old, nobody lost or twice."""

import os
import random
import signal
import time
from pathlib import Path
from statistics import fmean

import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, fates, in_transit, survivors

# `RLCTL_TEST_KILLS=10 make test ARGS=tests/faults` hurts runs longer than `make test` has time for.
KILLS = int(os.environ.get("RLCTL_TEST_KILLS", "2"))
# A step takes 0.1 s: the run must not be over before its last kill.
STEPS, PROMPTS, AGE = max(14, 10 * KILLS), 8, 2
ROWS = 2300


def hurt(run: Run, moments: random.Random, engine: bool) -> None:
    """kill -9 of the engine, which the run survives, or of the driver, after which nothing is left."""
    pids = run.wait_for_event("processes")
    done = max((step["step"] for step in run.steps()), default=0)
    run.wait_for_step(min(STEPS, done + moments.randint(1, 3)))
    time.sleep(moments.uniform(0, 0.5))
    if engine:
        os.kill(pids["engine-0"], signal.SIGKILL)
        run.wait_for_event("engine_restarted", engine=0)
    else:
        assert survivors(run.kill()) == []


@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * KILLS)
def test_engine_and_driver_killed_again_and_again(tmp_path: Path) -> None:
    settings = ("async.enabled=true", f"async.max_trajectory_age_steps={AGE}", "generation.max_restarts=20")
    size = (f"grpo.num_steps={STEPS}", "checkpoint.every=2", "validation.every=0")
    moments = random.Random(11)
    run = Run(tmp_path, "hurt", *settings, *size)
    for attempt in range(KILLS):
        hurt(run, moments, engine=attempt % 2 == 0)
        if run.process.poll() is not None:
            run = Run(tmp_path, "hurt", resume=True)
    assert run.end() == 0, run.text()

    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["age/max"] <= AGE for step in steps)
    assert max(step["age/max"] for step in steps) > 0
    assert all(sum(step[f"buffer/age_{age}"] for age in range(AGE + 1)) <= (AGE + 1) * PROMPTS for step in steps)
    # Older tokens are further from what trains on them.
    error = {age: [step[f"mismatch/age_{age}"] for step in steps if f"mismatch/age_{age}" in step] for age in (0, 1)}
    assert 1 <= fmean(error[0]) < 1.01 and fmean(error[0]) < fmean(error[1])
    ended = fates(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    drawn = Cursor(ROWS, 0, True).draw(STEPS * PROMPTS)
    assert set(ended) == {f"e{draw.epoch}-r{draw.row}" for draw in drawn}
    assert in_transit("hurt") == []
