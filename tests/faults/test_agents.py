"""Runs of agents survive kills of agents, environment processes, engine and driver.

No task is lost or trained twice, and no killed agent gets a reward of 0.
"""

import random
import sys
from pathlib import Path

import psutil
import pytest

from rlctl.data.cursor import Cursor
from tests.faults.runs import Run, in_transit, outcomes, read
from tests.faults.test_async import KILLS, PROMPTS
from tests.faults.test_episodes import BLOWS, command_of, compare_with_unhurt, hurt
from tests.system.test_episodes import data

AGE = 2
ROWS = 40
ROLLOUTS = 4
TURNS = 3
STEPS = 6 * KILLS
# Agent without an SDK, whose import would take longer than the episode. Its turns take long, so that each kill finds a
# running agent.
AGENT = f"""
import json, os, time
from urllib.request import Request, urlopen

task = json.loads(os.environ["RLCTL_TASK"])
messages = [{{"role": "user", "content": str(task["row"]["start"]) + " is where it starts"}}]
for turn in range({TURNS}):
    body = json.dumps({{"messages": messages}}).encode()
    key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    completion = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)))
    answer = completion["choices"][0]["message"]["content"] or ""
    messages += [{{"role": "assistant", "content": answer}}, {{"role": "user", "content": "turn " + str(turn)}}]
    time.sleep(0.1)
print(1 + len(answer))
"""
SETTINGS = (
    "model.path=tiny/qwen3-games", "model.random_init=true", "generation.max_new_tokens=6", "rewards=[]",
    f"agent.command={sys.executable} -S agent.py", "environment.processes=2", f"environment.max_turns={TURNS}",
    "environment.max_retries=20", "generation.max_restarts=20", "checkpoint.every=2", "checkpoint.keep_last=1000",
    "validation.every=0", f"telemetry.groups_per_step={PROMPTS}",
)  # fmt: skip
ASYNCHRONOUS = ("async.enabled=true", f"async.max_trajectory_age_steps={AGE}", f"grpo.num_steps={STEPS}")


def kill_an_agent(run: Run, moments: random.Random) -> None:
    """Wait for a running agent command, and kill it. If the agent ends before the kill, take the next one."""

    def has_killed() -> bool:
        family = psutil.Process(run.process.pid).children(recursive=True)
        running = [process for process in family if process.is_running()]
        agents = [process for process in running if "agent.py" in command_of(process)]
        if not agents:
            return False
        try:
            moments.choice(agents).kill()
        except psutil.NoSuchProcess:
            return False
        return True

    run.wait_for("an agent to kill", has_killed)


AGENT_BLOWS = (kill_an_agent, *BLOWS)


def check_groups(run: Run, age: int) -> int:
    """Check that trained groups have all rollouts, whole and with the agent's value. Return how many tries failed."""
    failures = 0
    for record in read(run.path / "rollouts.jsonl"):
        if record["kind"] != "group":
            continue
        assert [rollout["index"] for rollout in record["rollouts"]] == list(range(ROLLOUTS))
        for rollout in record["rollouts"]:
            failures += rollout["episode"]["failures"]
            assert (rollout["episode"]["ending"], rollout["episode"]["turns"]) == ("done", TURNS)
            # The agent returns at least 1, so a 0 would be the reward of a killed agent.
            assert rollout["reward"] >= 1
            assert [is_sampled for _, is_sampled in rollout["text"]] == [False, True] * TURNS
            assert all(record["step"] - 1 - int(version) in range(age + 1) for version in rollout["versions"])
    for step in run.steps():
        assert step["environment/failed"] == step["reward/failed"] == 0
        assert step["agent/rows_per_episode"] == 1
    return failures


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_an_asynchronous_run_of_agents_loses_none_and_trains_none_twice(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    settings = SETTINGS + ASYNCHRONOUS
    run = Run(tmp_path, "hurt-agents", *settings, *data(tmp_path))
    run = hurt(run, lambda: Run(tmp_path, "hurt-agents", resume=True), STEPS, AGENT_BLOWS)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) in range(1, AGE + 1)
    ended = outcomes(run.path)
    assert all(len(numbers) == 1 for numbers in ended.values())
    assert set(ended) == {f"e{draw.epoch}-r{draw.row}" for draw in Cursor(ROWS, 0, True).draw(STEPS * PROMPTS)}
    assert check_groups(run, AGE) > 0
    assert in_transit("hurt-agents") == []


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
def test_a_synchronous_run_of_agents_equals_one_that_nothing_happened_to_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    run = compare_with_unhurt(tmp_path, "agents", (*SETTINGS, *data(tmp_path)), AGENT_BLOWS)
    assert check_groups(run, 0) > 0
