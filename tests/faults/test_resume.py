"""A killed and resumed run continues as if nothing had happened, and no end of a run leaves anything behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.runs import WITHOUT_VLLM, Run, in_transit, outcomes, survivors
from tests.waiting import until

# Endless runs that keep all checkpoints. The killed run and the undisturbed one are compared at the killed one's step.
SETTINGS = ("grpo.num_steps=100000", "checkpoint.every=2", "checkpoint.keep_last=1000")
# As in test_async.py.
KILLS = int(os.environ.get("RLCTL_TEST_KILLS", "3"))
# Beginnings of metrics that depend on time or the machine, and are not compared.
LOOSE = ("time", "throughput/", "idle/", "memory/", "device/", "refit/")
LOOSE += ("train/teacher", "environment/seconds", "environment/retries", "agent/longest_turn")
# A program that was known before the kill is run again.
LOOSE += ("programs/",)
# The number of samples ahead in a synchronous step depends on the order of ends; its trained groups do not.
LOOSE += ("groups/surplus", "tokens/surplus", "tokens/wasted")
# Prefix hits depend on the order of requests.
LOOSE += ("generator/prefix_hit_share",)
# Requests that failed or were made before a kill.
LOOSE += ("judge/",)


def lasting_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Return those metrics of a step that are equal in a repetition of the run."""
    return {name: value for name, value in record.items() if not name.startswith(LOOSE)}


def check_same_runs(run: Run, unhurt: Run, last: int) -> None:
    """Check that metrics, the outcome of every prompt and all bits of the weights are equal up to step `last`."""
    metrics = metrics_until(run, last)
    assert [step["step"] for step in metrics] == list(range(1, last + 1))
    assert metrics == metrics_until(unhurt, last)
    assert all(len(steps) == 1 for steps in outcomes(run.path).values())
    assert outcomes_until(run, last) == outcomes_until(unhurt, last)
    folder = f"checkpoints/step_{last}/hf"
    (unhurt_file,) = (unhurt.path / folder).glob("*.safetensors")
    assert (run.path / folder / unhurt_file.name).read_bytes() == unhurt_file.read_bytes()


def check_a_kill_changes_nothing(folder: Path, settings: Sequence[str], last: int, kind: str = "grpo") -> None:
    """Run to step `last`; kill a second run after step 2 and resume it: both must be the same to the last bit."""
    unhurt = Run(folder, "whole", *settings, kind=kind)
    assert unhurt.end() == 0, unhurt.text()
    killed = Run(folder, "killed", *settings, kind=kind)
    killed.wait_for_step(2)
    killed.kill()
    resumed = Run(folder, "killed", resume=True, kind=kind)
    assert resumed.end() == 0, resumed.text()
    check_same_runs(resumed, unhurt, last)


def metrics_until(run: Run, last: int) -> list[dict[str, Any]]:
    return [lasting_metrics(step) for step in run.steps() if step["step"] <= last]


def outcomes_until(run: Run, last: int) -> dict[str, list[int]]:
    return {prompt_id: steps for prompt_id, steps in outcomes(run.path).items() if steps[0] <= last}


def kill_within_a_step(run: Run, moments: random.Random) -> None:
    run.wait_for_step(run.start() + moments.randint(2, 4))
    time.sleep(moments.uniform(0, 0.4))
    assert survivors(run.kill()) == []


def check_that_it_ends_with_one_line_without_its_trainer(run: Run) -> None:
    os.kill(run.wait_for_event("processes")["trainer-0"], signal.SIGKILL)
    assert run.end() == 1
    assert "trainer-0 died during" in run.text()
    assert f"rlctl train grpo --resume {run.path}" in run.text()


def has_warned_of_a_stop(run: Run) -> bool:
    return any(event.get("asked_to_stop") for event in run.events("warning"))


def interrupt_twice(run: Run, interrupt: Callable[[Run], str], status: str) -> list[str]:
    """Check that a second interrupt ends a run at once, although its trainer is stopped. Return both outputs."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    os.kill(run.wait_for_event("processes")["trainer-0"], signal.SIGSTOP)
    first_output = interrupt(run)
    run.wait_for("the warning of a stop", lambda: has_warned_of_a_stop(run))
    second_output = interrupt(run)
    assert run.end() == 130
    assert survivors(family) == []
    # Once, by the part that was asked twice.
    assert [event["status"] for event in run.events("run_ended")][-1:] == [status]
    assert "without a checkpoint of this step" in run.events()[-1]["reason"]
    return [first_output, second_output]


def press_ctrl_c(run: Run) -> str:
    run.interrupt()
    return ""


def call_runs_stop(run: Run) -> str:
    command = [sys.executable, "-m", "rlctl.cli.main", "runs", "stop", str(run.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    run = Run(tmp_path, "hurt-resume", WITHOUT_VLLM, *SETTINGS)
    run.wait_for_event("run_started")
    second_driver = Run(tmp_path, "hurt-resume", resume=True)
    assert second_driver.end() == 2
    assert f"is still running (process {run.process.pid})" in second_driver.text()
    kill_within_a_step(run, random.Random(7))
    run = Run(tmp_path, "hurt-resume", resume=True)
    last = run.wait_for_event("checkpoint")["step"]
    check_that_it_ends_with_one_line_without_its_trainer(run)

    unhurt = Run(tmp_path, "unhurt-resume", WITHOUT_VLLM, *SETTINGS)
    unhurt.wait_for_event("checkpoint", step=last)
    check_same_runs(run, unhurt, last)
    # The engine of one file serves the sent weights: the trainer finds its log-probs, before and after refits.
    assert all(abs(step["mismatch/token_mult_prob_error"] - 1) < 1e-5 for step in unhurt.steps())
    interrupt_twice(unhurt, press_ctrl_c, "interrupted")
    assert in_transit("hurt-resume") == in_transit("unhurt-resume") == []


@pytest.mark.long  # repetitions
@pytest.mark.timeout(900 + 120 * KILLS)
@pytest.mark.parametrize("training", [(), ("lora.rank=4", "trainer.optimizer.lr=3e-3")], ids=["weights", "adapters"])
def test_killed_again_and_again_equals_uninterrupted(training: tuple[str, ...], tmp_path: Path) -> None:
    moments = random.Random(7)
    run = Run(tmp_path, "killed", *SETTINGS, *training)
    for attempt in range(KILLS):
        if attempt == 1:  # once while it is only starting up
            run.wait_for_event("startup", what="trainer")
            assert survivors(run.kill()) == []
        else:
            kill_within_a_step(run, moments)
        run = Run(tmp_path, "killed", resume=True)
    last = run.wait_for_event("checkpoint")["step"]
    outputs = interrupt_twice(run, call_runs_stop, "stopped")
    assert outputs[0].startswith("killed ends after its step, and is saved") and outputs[1] == "killed ends now\n"
    unhurt = Run(tmp_path, "unhurt-resume", *SETTINGS, *training)
    unhurt.wait_for_event("checkpoint", step=last)
    unhurt.interrupt()
    assert unhurt.end() == 130
    check_same_runs(run, unhurt, last)
    assert in_transit("killed") == []


def test_a_run_that_was_stopped_before_it_began_is_listed(tmp_path: Path) -> None:
    run = Run(tmp_path, "early", WITHOUT_VLLM, *SETTINGS)
    run.wait_for("the run's folder", lambda: (run.path / "config.yaml").exists())
    run.interrupt()
    # The first may end it already.
    until(lambda: has_warned_of_a_stop(run) or run.process.poll() is not None, run.text)
    if run.process.poll() is None:
        run.interrupt()
    assert run.end() == 130
    assert [(event["kind"], event.get("status")) for event in run.events()][-1] == ("run_ended", "interrupted")
    command = [sys.executable, "-m", "rlctl.cli.main", "runs", "list", "--dir", str(run.path.parent)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert "early" in listing and "interrupted" in listing
