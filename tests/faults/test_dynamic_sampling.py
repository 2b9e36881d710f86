"""Dynamic sampling fills every batch although most groups teach nothing, and a kill and a resume do not change this."""

import random
import time
from pathlib import Path

import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, outcomes, read, survivors
from tests.faults.test_resume import check_same_runs

REWARD = """
import zlib

def score(prompt, completion, answer, row):
    if zlib.crc32(prompt.encode()) % 10 < 6:
        return 0.5
    return zlib.crc32(completion.encode()) % 97 / 97
"""
PROMPTS = 8
ROWS = 2300
LAST = 6
AGE = 2
SETTINGS = (
    "rewards=[{name: 'mostly.py:score'}]", "grpo.dynamic_sampling={filter: rewards, max_extra: 5}",
    f"grpo.num_steps={LAST}", "checkpoint.every=2", "validation.every=0",
)  # fmt: skip


def run_with_a_kill(folder: Path, *settings: str) -> Run:
    """Kill a run in its third or fourth step, and resume it to its end."""
    (folder / "mostly.py").write_text(REWARD)
    run = Run(folder, "hurt", *SETTINGS, *settings)
    run.wait_for_event("checkpoint", step=2)
    time.sleep(random.Random(3).uniform(0, 0.5))
    assert survivors(run.kill()) == []
    run = Run(folder, "hurt", resume=True)
    assert run.end() == 0, run.text()
    return run


def check_that_batches_are_full(run: Run) -> None:
    """Check that every step trains on its full number of groups, and records the cost."""
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, LAST + 1))
    assert all(step["groups/trained"] == PROMPTS and step["groups/missing"] == 0 for step in steps)
    records = [record for record in read(run.path / "rollouts.jsonl") if record["kind"] == "prompts"]
    trained_by_step = {record["step"]: len(record["trained"]) for record in records}
    assert trained_by_step == dict.fromkeys(range(1, LAST + 1), PROMPTS)
    filtered = sum(step["groups/filtered"] for step in steps)
    assert 0.45 < filtered / (filtered + LAST * PROMPTS) < 0.75
    assert all(step["groups/replaced"] == step["groups/filtered"] for step in steps)
    # 0.6 of the prompts teach nothing. A step has about 20 groups: the mean over six steps was 0.448 once.
    assert 0.4 < sum(step["tokens/wasted"] for step in steps) / LAST < 0.8
    for step in steps:
        assert step["tokens/wasted"] * (step["tokens/generated"] + step["tokens/surplus"]) == pytest.approx(
            step["tokens/filtered"] + step["tokens/surplus"]
        )


def check_that_tasks_end_once(run: Run) -> None:
    """Check that every drawn task ended exactly once. The ended tasks are the first draws, without a gap."""
    ended = outcomes(run.path)
    assert all(len(steps) == 1 for steps in ended.values())
    drawn = Cursor(ROWS, 0, True).draw(len(ended))
    assert set(ended) == {f"e{draw.epoch}-r{draw.row}" for draw in drawn}


@pytest.mark.long  # three starts; its rules: tests/unit/rollout/test_schedules.py
def test_a_synchronous_run_takes_the_first_that_teach_and_resumes_bit_exact(tmp_path: Path) -> None:
    run = run_with_a_kill(tmp_path)
    unhurt = Run(tmp_path, "unhurt", *SETTINGS)
    assert unhurt.end() == 0, unhurt.text()
    check_same_runs(run, unhurt, LAST)
    check_that_batches_are_full(run)
    check_that_tasks_end_once(run)
    assert sum(step["groups/surplus"] for step in run.steps()) > 0


@pytest.mark.long  # one run and its resume; its rules: tests/unit/rollout/test_schedules.py
def test_an_asynchronous_run_replaces_at_once_and_keeps_its_bound(tmp_path: Path) -> None:
    run = run_with_a_kill(tmp_path, "async.enabled=true", f"async.max_trajectory_age_steps={AGE}")
    check_that_batches_are_full(run)
    check_that_tasks_end_once(run)
    steps = run.steps()
    assert 0 < max(step["age/max"] for step in steps) <= AGE
    assert all(sum(step[f"buffer/age_{age}"] for age in range(AGE + 1)) <= (AGE + 1) * PROMPTS for step in steps)
