"""Runs of agents whose agents, environment processes, engine and driver are killed: nobody lost, nobody twice, no 0."""

import random
import sys
from pathlib import Path

import psutil
import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, in_transit, outcomes, read
from tests.faults.test_async import KILLS, PROMPTS
from tests.faults.test_episodes import BLOWS, command_of, equal_to_an_unhurt_one, hurt
from tests.system.test_episodes import data

AGE, ROWS, ROLLOUTS, TURNS, STEPS = 2, 40, 4, 3, 6 * KILLS
# Without an SDK, which takes longer to import than the episode. Turns last, so that every kill finds an agent.
AGENT = f"""
import json, os, time
from urllib.request import Request, urlopen

task = json.loads(os.environ["RLCTL_TASK"])
messages = [{{"role": "user", "content": str(task["row"]["start"]) + " is where it starts"}}]
for turn in range({TURNS}):
    body = json.dumps({{"messages": messages}}).encode()
    key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    told = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)))
    said = told["choices"][0]["message"]["content"] or ""
    messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "turn " + str(turn)}}]
    time.sleep(0.1)
print(1 + len(said))
"""
SETTINGS = (
    *("model.path=tiny/qwen3-games", "model.random_init=true", "generation.max_new_tokens=6", "rewards=[]"),
    f"agent.command={sys.executable} -S agent.py",
    *("environment.processes=2", f"environment.max_turns={TURNS}", "environment.max_retries=20"),
    *("generation.max_restarts=20", "checkpoint.every=2", "checkpoint.keep_last=1000", "validation.every=0"),
    f"telemetry.groups_per_step={PROMPTS}",
)
ASYNCHRONOUS = ("async.enabled=true", f"async.max_trajectory_age_steps={AGE}", f"grpo.num_steps={STEPS}")


def without_an_agent_it_goes_on(run: Run, moments: random.Random) -> None:
    """Kill a command of the run, once there is one."""
    found: list[psutil.Process] = []

    def seen() -> bool:
        family = psutil.Process(run.process.pid).children(recursive=True)
        found[:] = [each for each in family if each.is_running() and "agent.py" in command_of(each)]
        return bool(found)

    run.wait_for("an agent", seen)
    moments.choice(found).kill()


AGENT_BLOWS = (without_an_agent_it_goes_on, *BLOWS)


def whole_and_valued(run: Run, age: int) -> int:
    """Every group that was trained has all of its rollouts, whole, with the agent's value. Returns the failed tries."""
    failures = 0
    for record in read(run.path / "rollouts.jsonl"):
        if record["kind"] != "group":
            continue
        assert [one["index"] for one in record["rollouts"]] == list(range(ROLLOUTS))
        for one in record["rollouts"]:
            failures += one["episode"]["failures"]
            assert (one["episode"]["ending"], one["episode"]["turns"]) == ("done", TURNS)
            # The agent gives at least 1: a 0 would be nobody's.
            assert one["reward"] >= 1
            assert [mark for _, mark in one["text"]] == [False, True] * TURNS
            assert all(record["step"] - 1 - int(version) in range(age + 1) for version in one["versions"])
    for step in run.steps():
        assert (step["environment/failed"], step["reward/failed"], step["agent/rows_per_episode"]) == (0, 0, 1)
    return failures


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_an_asynchronous_run_of_agents_loses_none_and_trains_none_twice(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    run = Run(tmp_path, "hurt-agents", *SETTINGS, *data(tmp_path), *ASYNCHRONOUS)
    run = hurt(run, lambda: Run(tmp_path, "hurt-agents", resume=True), STEPS, AGENT_BLOWS)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) in range(1, AGE + 1)
    ended = outcomes(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    assert set(ended) == {f"e{each.epoch}-r{each.row}" for each in Cursor(ROWS, 0, True).draw(STEPS * PROMPTS)}
    assert whole_and_valued(run, AGE) > 0
    assert in_transit("hurt-agents") == []


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_a_synchronous_run_of_agents_equals_one_that_nothing_happened_to_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    run = equal_to_an_unhurt_one(tmp_path, "agents", (*SETTINGS, *data(tmp_path)), AGENT_BLOWS)
    assert whole_and_valued(run, 0) > 0
