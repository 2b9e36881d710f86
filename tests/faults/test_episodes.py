"""Runs of episodes survive kills of driver, engine and environment processes: no task is lost or trained twice."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, in_transit, outcomes, read, survivors
from tests.faults.test_async import KILLS, PROMPTS, kill_the_engine
from tests.faults.test_resume import check_same_runs
from tests.system.test_episodes import data

AGE = 2
ROWS = 40
ROLLOUTS = 4
STEPS = 6 * KILLS
# Environment with long episodes, so that each kill finds running ones.
SLOW = """
import time
from rlctl.environments.guess import Guess

class Slow(Guess):
    def step(self, message):
        time.sleep(0.1)
        return super().step(message)
"""
SETTINGS = (
    "model.path=tiny/qwen3-games", "model.random_init=true", "generation.max_new_tokens=6", "rewards=[]",
    "environment={name: slow.py:Slow, max_turns: 4, args: {guesses: 5}, processes: 2}",
    "generation.max_restarts=20", "checkpoint.every=2", "checkpoint.keep_last=1000", "validation.every=0",
    f"telemetry.groups_per_step={PROMPTS}",
)  # fmt: skip
ASYNCHRONOUS = ("async.enabled=true", f"async.max_trajectory_age_steps={AGE}", f"grpo.num_steps={STEPS}")


def kill_an_environment_process(run: Run, moments: random.Random) -> None:
    """Kill either a supervisor or the process below it, which runs the episodes."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    environment_processes = [process for process in family if "rlctl.environments.child" in command_of(process)]
    moments.choice(environment_processes).kill()


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process as words; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


Blow = Callable[[Run, random.Random], None]
BLOWS: tuple[Blow, ...] = (
    kill_an_environment_process,
    lambda run, moments: kill_the_engine(run),
)


def hurt(run: Run, resume: Callable[[], Run], last: int, blows: Sequence[Blow] = BLOWS) -> Run:
    """Apply all `blows` in turn, kill the driver and resume, and repeat this until step `last`. Return the last run."""
    moments = random.Random(5)
    for kill in range(KILLS):
        done = max((step["step"] for step in run.steps()), default=0)
        run.wait_for_step(min(last, done + moments.randint(1, 3)))
        time.sleep(moments.uniform(0, 0.8))
        turn = kill % (len(blows) + 1)
        if turn < len(blows):
            blows[turn](run, moments)
        else:
            assert survivors(run.kill()) == []
            run = resume()
    return run


def check_groups(run: Run, age: int) -> int:
    """Check that each trained group has all episodes and none above age `age`. Return the number of failed tries."""
    failures = 0
    for record in read(run.path / "rollouts.jsonl"):
        if record["kind"] != "group":
            continue
        assert [rollout["index"] for rollout in record["rollouts"]] == list(range(ROLLOUTS))
        for rollout in record["rollouts"]:
            episode = rollout["episode"]
            failures += episode["failures"]
            assert episode["ending"] in ("done", "max_turns") and rollout["reward"] is not None
            assert [is_sampled for _, is_sampled in rollout["text"]] == [False, True] * episode["turns"]
            assert all(record["step"] - 1 - int(version) in range(age + 1) for version in rollout["versions"])
    assert all(step["environment/failed"] == step["reward/failed"] == 0 for step in run.steps())
    return failures


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_an_asynchronous_run_of_episodes_loses_none_and_trains_none_twice(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    settings = SETTINGS + ASYNCHRONOUS
    run = Run(tmp_path, "hurt-episodes", *settings, *data(tmp_path))
    run = hurt(run, lambda: Run(tmp_path, "hurt-episodes", resume=True), STEPS)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) in range(1, AGE + 1)
    ended = outcomes(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    assert set(ended) == {f"e{draw.epoch}-r{draw.row}" for draw in Cursor(ROWS, 0, True).draw(STEPS * PROMPTS)}
    assert check_groups(run, AGE) > 0
    assert in_transit("hurt-episodes") == []


def compare_with_unhurt(tmp_path: Path, kind: str, settings: Sequence[str], blows: Sequence[Blow] = BLOWS) -> Run:
    """Hurt a synchronous run, check that it equals an undisturbed run bit by bit, and return it."""
    settings = (*settings, "grpo.num_steps=100000")
    hurt_name = f"hurt-{kind}"
    unhurt_name = f"unhurt-{kind}"
    run = Run(tmp_path, hurt_name, *settings)
    run = hurt(run, lambda: Run(tmp_path, hurt_name, resume=True), 100000, blows)
    run.wait_for_step(max(step["step"] for step in run.steps()) + 4)
    run.interrupt()
    assert run.end() == 130
    # The interrupt may have saved another step than the second, fourth, and so on.
    last = len(run.steps()) // 2 * 2
    unhurt = Run(tmp_path, unhurt_name, *settings)
    unhurt.wait_for_event("checkpoint", step=last)
    unhurt.interrupt()
    assert unhurt.end() == 130
    check_same_runs(run, unhurt, last)
    assert in_transit(hurt_name) == in_transit(unhurt_name) == []
    return run


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_a_synchronous_run_of_episodes_equals_one_that_nothing_happened_to_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = compare_with_unhurt(tmp_path, "episodes", (*SETTINGS, *data(tmp_path)))
    assert check_groups(run, 0) > 0
