"""Rewards that fail in a live run: told, counted apart, and in the end the reason to stop with a checkpoint."""

import json
import os
import random
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import WITHOUT_VLLM, Run, read, survivors

# Processes of this test alone, not of others on the machine.
SECONDS = f"999999.{random.SystemRandom().randrange(10**9)}"
REWARD = f"""
import os
import subprocess

subprocess.Popen(["sleep", "{SECONDS}"], start_new_session=True)


def score(prompt, completion, answer, row):
    if int(answer) % 3 == 0 or os.path.exists("broken"):
        raise ValueError(f"no idea of {{prompt}}{{completion}}")
    return float(completion == answer)
"""


def left_by_the_reward() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if SECONDS in (process.info["cmdline"] or [])]


def test_rewards_that_fail_are_told_once_counted_apart_and_stop_the_run_when_most_of_them_do(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    settings = (
        "rewards=[{name: 'mine:score'}, {name: exact, weight: 0.1}]",
        *("grpo.num_steps=100000", "checkpoint.every=0", "health.failed_reward_steps=2"),
        *("validation.every=2", "validation.max_prompts=30", "telemetry.groups_per_step=8", "run.log_every=1"),
    )
    run = Run(tmp_path, "failing", WITHOUT_VLLM, *settings)
    run.wait_for_step(3)
    left = left_by_the_reward()
    assert left
    # Rewards start while Ray does. In Ray's temporary folder they would end together with Ray. The Ray of an earlier
    # test in this process leaves the path of its token.
    rays = {"VLLM_HOST_IP", "RAY_AUTH_TOKEN_PATH"} - set(os.environ)
    assert not rays & {name for process in left for name in process.environ()}
    assert {process.environ().get("TMPDIR") for process in left} == {os.environ.get("TMPDIR")}
    (tmp_path / "broken").touch()
    assert run.end() == 1, run.text()
    assert survivors(left_by_the_reward()) == []

    text, steps = run.text(), run.steps()
    last = len(steps)
    it_is_told_once(run, text)
    assert f"step {last}: rewards failed for 100% of the rollouts, in 2 steps in a row for more than 50%" in text
    assert f"most of them score: raised ValueError at {Path('mine.py')}:10" in text
    assert f"rlctl train grpo --resume {run.path}" in text
    assert " rewards failed\n" in text and "\nfailed rewards " in text
    state = json.loads((run.path / "checkpoints" / f"step_{last}" / "state.json").read_text())
    assert (state["version"], steps[-1]["version"]) == (last, last)

    first, end = steps[0], steps[-1]
    assert 0 < first["reward/failed"] == first["reward/score/failed"] < 32 and first["reward/exact/failed"] == 0
    assert first["reward/accuracy"] == pytest.approx(first["reward/score/mean"])
    assert (end["reward/failed"], "reward/mean" in end, "reward/exact/mean" in end) == (32, False, True)
    accuracy_is_of_what_was_scored(run)


def it_is_told_once(run: Run, text: str) -> None:
    """Though the message differs from rollout to rollout."""
    warned = [event["what"] for event in run.events() if event["kind"] == "warning" and "check" not in event]
    told = [what for what in warned if not what.startswith("torch_engine.py ")]
    # Steps whose rollouts have no reward have nothing to train on. Rewards that are all equal have no gradient either.
    skipped = [what for what in told if " no optimizer step, " in what]
    assert len(told) == 1 + len(skipped) and sum("no token to train on" in what for what in skipped) == 1
    assert told[0].startswith("reward score: raised ValueError at mine.py:10: no idea of ")
    assert text.count("warning     reward score: raised ValueError at mine.py:10") == 1
    errors = (run.path / "logs" / "latest" / "reward-errors.log").read_text()
    assert errors.count("Traceback") == 1
    assert f'File "{run.path.parents[1] / "mine.py"}", line 10, in score' in errors


def accuracy_is_of_what_was_scored(run: Run) -> None:
    held_out = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    answers = [int(row["answer"]) for row in read(_recipes() / "tiny-data" / "validation.jsonl")][:30]
    failing = sum(answer % 3 == 0 for answer in answers)
    before = held_out[0]
    assert before["validation/failed_rewards"] == failing > 0
    right = before["validation/accuracy"] * (30 - failing)
    assert right == pytest.approx(round(right)) and right > 0
    assert before["validation/reward"] == pytest.approx(1.1 * before["validation/accuracy"])
    groups = [record for record in read(run.path / "rollouts.jsonl") if record["kind"] == "group"]
    shown = [rollout for group in groups for rollout in group["rollouts"]]
    failed = [record for record in shown if record["failed"]]
    assert 0 < len(failed) < len(shown)
    assert all(record["rewards"]["score"] is None and record["right"] is None for record in failed)
    assert all(set(record["rewards"]) == {"score", "exact"} for record in shown)


def _recipes() -> Path:
    from rlctl.config.builtin import RECIPES

    return RECIPES
