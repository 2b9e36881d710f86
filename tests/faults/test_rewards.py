"""Rewards that fail in a live run are reported and counted, and finally stop the run with a checkpoint."""

import json
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run, read, survivors

# Argument of `sleep` by which this test finds its processes among others on the machine.
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


def processes_of_the_reward() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if SECONDS in (process.info["cmdline"] or [])]


def test_rewards_that_fail_are_told_once_counted_apart_and_stop_the_run_when_most_of_them_do(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    run = Run(
        tmp_path, "failing", WITHOUT_VLLM, "rewards=[{name: 'mine:score'}, {name: exact, weight: 0.1}]",
        "grpo.num_steps=100000", "checkpoint.every=0", "health.failed_reward_steps=2", "validation.every=2",
        "validation.max_prompts=30", "telemetry.groups_per_step=8", "run.log_every=1",
    )  # fmt: skip
    run.wait_for_step(3)
    processes = processes_of_the_reward()
    assert processes
    # Rewards start while Ray does. In Ray's temporary folder they would end together with Ray. The Ray of an earlier
    # test in this process leaves the path of its token.
    variables_of_ray = {"VLLM_HOST_IP", "RAY_AUTH_TOKEN_PATH"} - set(os.environ)
    for process in processes:
        assert variables_of_ray.isdisjoint(process.environ())
        assert process.environ().get("TMPDIR") == os.environ.get("TMPDIR")
    (tmp_path / "broken").touch()
    assert run.end() == 1, run.text()
    assert survivors(processes_of_the_reward()) == []

    text = run.text()
    steps = run.steps()
    last = len(steps)
    check_that_it_is_told_once(run, text)
    assert f"step {last}: rewards failed for 100% of the rollouts, in 2 steps in a row for more than 50%" in text
    assert f"most of them score: raised ValueError at {Path('mine.py')}:10" in text
    assert f"rlctl train grpo --resume {run.path}" in text
    assert " rewards failed\n" in text and "\nfailed rewards " in text
    state = json.loads((run.path / "checkpoints" / f"step_{last}" / "state.json").read_text())
    assert (state["version"], steps[-1]["version"]) == (last, last)

    first = steps[0]
    assert 0 < first["reward/failed"] == first["reward/score/failed"] < 32 and first["reward/exact/failed"] == 0
    assert first["reward/accuracy"] == pytest.approx(first["reward/score/mean"])
    assert steps[-1]["reward/failed"] == 32
    assert "reward/mean" not in steps[-1] and "reward/exact/mean" in steps[-1]
    check_that_accuracy_is_of_scored_rollouts(run)


def check_that_it_is_told_once(run: Run, text: str) -> None:
    """Check that the failure is one warning, though its message differs from rollout to rollout."""
    warnings = [event["what"] for event in run.events("warning") if "check" not in event]
    warnings = [warning for warning in warnings if not warning.startswith("torch_engine.py ")]
    # Steps whose rollouts have no reward have nothing to train on. Rewards that are all equal have no gradient either.
    skips = [warning for warning in warnings if " no optimizer step, " in warning]
    assert len(warnings) == 1 + len(skips) and sum("no token to train on" in skip for skip in skips) == 1
    assert warnings[0].startswith("reward score: raised ValueError at mine.py:10: no idea of ")
    assert text.count("warning     reward score: raised ValueError at mine.py:10") == 1
    errors = (run.path / "logs" / "latest" / "reward-errors.log").read_text()
    assert errors.count("Traceback") == 1
    assert f'File "{run.path.parents[1] / "mine.py"}", line 10, in score' in errors


def check_that_accuracy_is_of_scored_rollouts(run: Run) -> None:
    validations = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    answers = [int(row["answer"]) for row in read(RECIPES / "tiny-data" / "validation.jsonl")][:30]
    failures = sum(answer % 3 == 0 for answer in answers)
    first = validations[0]
    assert first["validation/failed_rewards"] == failures > 0
    right_answers = first["validation/accuracy"] * (30 - failures)
    assert right_answers == pytest.approx(round(right_answers)) and right_answers > 0
    assert first["validation/reward"] == pytest.approx(1.1 * first["validation/accuracy"])
    rollouts: list[dict[str, Any]] = []
    for record in read(run.path / "rollouts.jsonl"):
        if record["kind"] == "group":
            rollouts += record["rollouts"]
    failed_rollouts = [rollout for rollout in rollouts if rollout["failed"]]
    assert 0 < len(failed_rollouts) < len(rollouts)
    assert all(rollout["rewards"]["score"] is None and rollout["right"] is None for rollout in failed_rollouts)
    assert all(set(rollout["rewards"]) == {"score", "exact"} for rollout in rollouts)
