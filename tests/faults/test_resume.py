"""A run that is killed and resumed goes on as if nothing had happened; every end leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.runs import WITHOUT_VLLM, Run, in_transit, outcomes, survivors
from tests.waiting import until

# Without an end: they are compared where the hurt one happens to be. Every checkpoint is kept.
SETTINGS = ("grpo.num_steps=100000", "checkpoint.every=2", "checkpoint.keep_last=1000")
# As in test_async.py.
KILLS = int(os.environ.get("RLCTL_TEST_KILLS", "3"))
# Values of the clock or the machine, not of the run.
LOOSE = ("time", "throughput/", "idle/", "memory/", "device/", "refit/")
LOOSE += ("environment/seconds", "environment/retries", "agent/longest_turn")
# The number of samples ahead in a synchronous step depends on the order of ends; its trained groups do not.
LOOSE += ("groups/surplus", "tokens/surplus", "tokens/wasted")
# Prefix hits depend on the order of requests.
LOOSE += ("generator/prefix_hit_share",)


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(LOOSE)}


def same(run: Run, whole: Run, last: int) -> None:
    """Up to step `last`: metrics, the outcome of every prompt, and the weights bit by bit."""
    ours, theirs = ([lasting(step) for step in each.steps() if step["step"] <= last] for each in (run, whole))
    assert [step["step"] for step in ours] == list(range(1, last + 1))
    assert ours == theirs
    ended, expected = outcomes(run.path), outcomes(whole.path)
    assert all(len(steps) == 1 for steps in ended.values())
    until = [{name: steps for name, steps in each.items() if steps[0] <= last} for each in (ended, expected)]
    assert until[0] == until[1]
    [name] = sorted(file.name for file in (whole.path / f"checkpoints/step_{last}/hf").glob("*.safetensors"))
    weights = [(each.path / f"checkpoints/step_{last}/hf" / name).read_bytes() for each in (run, whole)]
    assert weights[0] == weights[1]


def killed(run: Run, moments: random.Random) -> None:
    run.wait_for_step(run.start() + moments.randint(2, 4))
    time.sleep(moments.uniform(0, 0.4))
    assert survivors(run.kill()) == []


def without_its_trainer_it_ends_with_one_line(run: Run) -> None:
    os.kill(run.wait_for_event("processes")["trainer-0"], signal.SIGKILL)
    assert run.end() == 1
    assert "trainer-0 died during" in run.text()
    assert f"rlctl train grpo --resume {run.path}" in run.text()


def stop_was_told(run: Run) -> bool:
    return any(event.get("asked_to_stop") for event in run.events() if event["kind"] == "warning")


def interrupted_twice_it_stops_at_once(run: Run, interrupt: Callable[[Run], str], status: str) -> list[str]:
    """Though the step cannot end: the trainer stands still. Returns the result of `interrupt`."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    os.kill(run.wait_for_event("processes")["trainer-0"], signal.SIGSTOP)
    first = interrupt(run)
    run.wait_for("the warning of a stop", lambda: stop_was_told(run))
    said = [first, interrupt(run)]
    assert run.end() == 130
    assert survivors(family) == []
    # Once, by the part that was asked twice.
    assert [event["status"] for event in run.events() if event["kind"] == "run_ended"][-1:] == [status]
    assert "without a checkpoint of this step" in run.events()[-1]["reason"]
    return said


def ctrl_c(run: Run) -> str:
    run.interrupt()
    return ""


def runs_stop(run: Run) -> str:
    command = [sys.executable, "-m", "rlctl.cli.main", "runs", "stop", str(run.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    run = Run(tmp_path, "hurt-resume", WITHOUT_VLLM, *SETTINGS)
    run.wait_for_event("run_started")
    second = Run(tmp_path, "hurt-resume", resume=True)
    assert second.end() == 2
    assert f"is still running (process {run.process.pid})" in second.text()
    killed(run, random.Random(7))
    run = Run(tmp_path, "hurt-resume", resume=True)
    last = run.wait_for_event("checkpoint")["step"]
    without_its_trainer_it_ends_with_one_line(run)

    whole = Run(tmp_path, "whole-resume", WITHOUT_VLLM, *SETTINGS)
    whole.wait_for_event("checkpoint", step=last)
    same(run, whole, last)
    # The engine of one file serves the sent weights: the trainer finds its log-probs, before and after refits.
    assert all(abs(step["mismatch/token_mult_prob_error"] - 1) < 1e-5 for step in whole.steps())
    interrupted_twice_it_stops_at_once(whole, ctrl_c, "interrupted")
    assert in_transit("hurt-resume") == in_transit("whole-resume") == []


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
@pytest.mark.parametrize("trained", [(), ("lora.rank=4", "trainer.optimizer.lr=3e-3")], ids=["weights", "adapters"])
def test_killed_again_and_again_equals_uninterrupted(trained: tuple[str, ...], tmp_path: Path) -> None:
    moments = random.Random(7)
    run = Run(tmp_path, "killed", *SETTINGS, *trained)
    for attempt in range(KILLS):
        if attempt == 1:  # once while it is only starting up
            run.wait_for_event("startup", what="trainer")
            assert survivors(run.kill()) == []
        else:
            killed(run, moments)
        run = Run(tmp_path, "killed", resume=True)
    last = run.wait_for_event("checkpoint")["step"]
    first, second = interrupted_twice_it_stops_at_once(run, runs_stop, "stopped")
    assert first.startswith("killed ends after its step, and is saved") and second == "killed ends now\n"
    whole = Run(tmp_path, "whole-resume", *SETTINGS, *trained)
    whole.wait_for_event("checkpoint", step=last)
    whole.interrupt()
    assert whole.end() == 130
    same(run, whole, last)
    assert in_transit("killed") == []


def test_a_run_that_was_stopped_before_it_began_is_listed(tmp_path: Path) -> None:
    run = Run(tmp_path, "early", WITHOUT_VLLM, *SETTINGS)
    run.wait_for("the run's folder", lambda: (run.path / "config.yaml").exists())
    run.interrupt()
    # The first may end it already.
    until(lambda: stop_was_told(run) or run.process.poll() is not None, run.text)
    if run.process.poll() is None:
        run.interrupt()
    assert run.end() == 130
    assert [(event["kind"], event.get("status")) for event in run.events()][-1] == ("run_ended", "interrupted")
    command = [sys.executable, "-m", "rlctl.cli.main", "runs", "list", "--dir", str(run.path.parent)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert "early" in listed and "interrupted" in listed
