"""A run that is killed and resumed, however often, ends as if nothing had happened."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import Run, fates, in_transit, survivors

STEPS = 10
# As in test_async.py.
KILLS = int(os.environ.get("RLCTL_TEST_KILLS", "1"))
# What depends on the clock or the machine, not on the run.
LOOSE = ("time", "throughput/", "idle/", "memory/", "device/", "refit/")


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(LOOSE)}


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    settings = (f"grpo.num_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep_last=10")
    whole = Run(tmp_path, "whole", *settings)
    assert whole.end() == 0, whole.text()

    moments = random.Random(7)
    run = Run(tmp_path, "killed", *settings)
    for attempt in range(KILLS):
        done = max((step["step"] for step in run.steps()), default=0)
        if attempt == 1:  # once, of several while it is only starting up
            run.wait_for_event("startup", what="trainer")
        else:
            run.wait_for_step(min(STEPS, done + moments.randint(1, 3)))
        time.sleep(moments.uniform(0, 0.4))
        family = run.kill()
        assert survivors(family) == []
        run = Run(tmp_path, "killed", resume=True)
    assert run.end() == 0, run.text()

    ours, theirs = ([lasting(record) for record in each.steps()] for each in (run, whole))
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    assert ours == theirs
    assert fates(run.path) == fates(whole.path)
    assert all(len(steps) == 1 for steps in fates(run.path).values())
    name = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert in_transit("killed") == []
