"""Runs of episodes whose driver, engine and environment processes are killed: nobody lost, nobody trained twice."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, in_transit, outcomes, read, survivors
from tests.faults.test_async import KILLS, PROMPTS, without_its_engine_it_goes_on
from tests.faults.test_resume import same
from tests.system.test_episodes import data

AGE, ROWS, ROLLOUTS, STEPS = 2, 40, 4, 6 * KILLS
# Episodes last, so that every kill finds running ones.
SLOW = """
import time
from rlctl.environments.guess import Guess

class Slow(Guess):
    def step(self, message):
        time.sleep(0.1)
        return super().step(message)
"""
SETTINGS = (
    *("model.path=tiny/qwen3-games", "model.random_init=true", "generation.max_new_tokens=6", "rewards=[]"),
    "environment={name: slow.py:Slow, max_turns: 4, args: {guesses: 5}, processes: 2}",
    *("generation.max_restarts=20", "checkpoint.every=2", "checkpoint.keep_last=1000", "validation.every=0"),
    f"telemetry.groups_per_step={PROMPTS}",
)
ASYNCHRONOUS = ("async.enabled=true", f"async.max_trajectory_age_steps={AGE}", f"grpo.num_steps={STEPS}")


def without_an_environment_process_it_goes_on(run: Run, moments: random.Random) -> None:
    """Either a supervisor or the process below it, which runs the episodes."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    moments.choice([each for each in family if "rlctl.environments.child" in command_of(each)]).kill()


def command_of(process: psutil.Process) -> list[str]:
    """The words of a process's command; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


Blow = Callable[[Run, random.Random], None]
BLOWS: tuple[Blow, ...] = (
    without_an_environment_process_it_goes_on,
    lambda run, moments: without_its_engine_it_goes_on(run),
)


def hurt(run: Run, resumed: Callable[[], Run], last: int, blows: Sequence[Blow] = BLOWS) -> Run:
    """Strike each of `blows` in turn, then kill the driver, and so on; return the attempt that is left."""
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
            run = resumed()
    return run


def whole_and_no_older_than(run: Run, age: int) -> int:
    """Every group that was trained has all of its episodes. Returns the tries that failed."""
    failures = 0
    for record in read(run.path / "rollouts.jsonl"):
        if record["kind"] != "group":
            continue
        assert [one["index"] for one in record["rollouts"]] == list(range(ROLLOUTS))
        for one in record["rollouts"]:
            failures += one["episode"]["failures"]
            assert one["episode"]["ending"] in ("done", "max_turns") and one["reward"] is not None
            assert [mark for _, mark in one["text"]] == [bool(n % 2) for n in range(2 * one["episode"]["turns"])]
            assert all(record["step"] - 1 - int(version) in range(age + 1) for version in one["versions"])
    assert all(step["environment/failed"] == step["reward/failed"] == 0 for step in run.steps())
    return failures


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_an_asynchronous_run_of_episodes_loses_none_and_trains_none_twice(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = Run(tmp_path, "hurt-episodes", *SETTINGS, *data(tmp_path), *ASYNCHRONOUS)
    run = hurt(run, lambda: Run(tmp_path, "hurt-episodes", resume=True), STEPS)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) in range(1, AGE + 1)
    ended = outcomes(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    assert set(ended) == {f"e{each.epoch}-r{each.row}" for each in Cursor(ROWS, 0, True).draw(STEPS * PROMPTS)}
    assert whole_and_no_older_than(run, AGE) > 0
    assert in_transit("hurt-episodes") == []


def equal_to_an_unhurt_one(tmp_path: Path, kind: str, settings: Sequence[str], blows: Sequence[Blow] = BLOWS) -> Run:
    """Return a synchronous run that was hurt, once it equals one that nothing happened to bit for bit."""
    settings, hurt_name, whole_name = (*settings, "grpo.num_steps=100000"), f"hurt-{kind}", f"whole-{kind}"
    run = Run(tmp_path, hurt_name, *settings)
    run = hurt(run, lambda: Run(tmp_path, hurt_name, resume=True), 100000, blows)
    run.wait_for_step(max(step["step"] for step in run.steps()) + 4)
    run.interrupt()
    assert run.end() == 130
    # The interrupt may have saved another step than the second, fourth, and so on.
    last = len(run.steps()) // 2 * 2
    whole = Run(tmp_path, whole_name, *settings)
    whole.wait_for_event("checkpoint", step=last)
    whole.interrupt()
    assert whole.end() == 130
    same(run, whole, last)
    assert in_transit(hurt_name) == in_transit(whole_name) == []
    return run


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_a_synchronous_run_of_episodes_equals_one_that_nothing_happened_to_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = equal_to_an_unhurt_one(tmp_path, "episodes", (*SETTINGS, *data(tmp_path)))
    assert whole_and_no_older_than(run, 0) > 0
