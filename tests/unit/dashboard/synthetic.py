"""Writes run directories with deterministic synthetic records, in the form of real runs."""

import math
from collections.abc import Callable
from pathlib import Path

from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.utils.process import identity

START = 1_800_000_000.0
STEP_SECONDS = 2.5


class Ticker:
    """Clock for synthetic records. Each reading is 0.01 s after the one before."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def step_metrics(step: int) -> dict[str, float]:
    wave = math.sin(step)
    accuracy = 0.95 - 0.6 * math.exp(-step / 8)
    return {
        "version": step,
        "reward/mean": accuracy,
        "reward/accuracy": accuracy,
        "loss/policy": 0.01 * wave,
        "loss/kl": 0.001 * step,
        "train/grad_norm": 0.5 + 0.1 * wave,
        "mismatch/token_mult_prob_error": 1.0003,
        "length/mean": 12.0 + wave,
        "length/truncated": 0.25 / step,
        "throughput/effective": 1200.0 + 10 * wave,
        "throughput/training": 6000.0,
        "throughput/generation": 2500.0,
        "idle/trainer": 0.6,
        "idle/generator": 0.4,
        "memory/trainer_gib": 0.4,
        "memory/engine_gib": 1.1,
        "time/generation": 1.5,
        "time/train": 0.8,
        "time/other": 0.2,
        "time/step": STEP_SECONDS,
    }


def async_metrics(step: int) -> dict[str, float]:
    """Return the metrics of a step with age bound 2. It trains half of the time, and waits for groups in a fifth."""
    common = {name: metric for name, metric in step_metrics(step).items() if not name.startswith("time/")}
    ages = {
        "age/mean": 0.75,
        "age/max": 2.0,
        "age/mixed": 0.25,
        "age/groups_0": 8,
        "age/groups_1": 4,
        "age/groups_2": 2,
    }
    buffer = {
        "buffer/age_0": 10,
        "buffer/age_1": 6,
        "buffer/age_2": 0,
        "mismatch/age_0": 1.0004,
        "mismatch/age_1": 1.03,
    }
    times = {"time/train": 1.25, "time/idle_oldest": 0.5, "time/idle_rollouts": 0.25, "time/refit": 0.25}
    refit = {"refit/seconds": 0.25, "refit/stall": 0.004}
    return {**common, **ages, **buffer, **times, **refit, "time/other": 0.25, "time/step": STEP_SECONDS}


def on_engines(step: int) -> dict[str, float]:
    """Return `async_metrics` of a run that also waits for a teacher on engines, half a second a step."""
    times = {"time/idle_rollouts": 0.0, "time/idle_oldest": 0.25, "time/idle_teacher": 0.5}
    teacher = {"memory/teacher_gib": 3.5, "memory/driver_gib": 0.5, "idle/teacher": 0.75}
    return {**async_metrics(step), **times, **teacher}


def write_run(
    root: Path,
    name: str = "grpo--tiny--1",
    steps: int = 20,
    ended: str | None = "done",
    algorithm: str = "grpo",
    metrics: Callable[[int], dict[str, float]] = step_metrics,
    devices: tuple[int, int] = (1, 1),
) -> RunDir:
    """Write a run that has done `steps` of 20 steps, with a validation and a checkpoint every 5.

    ended: the run's status; None if it still runs.
    """
    run = RunDir.create(name, root)
    run.start_attempt()
    run.config.write_text("checkpoint:\n  metric: validation/accuracy\nhealth:\n  max_token_mult_prob_error: 1.02\n")
    clock = Ticker()
    events = EventLog(run.events, clock)
    log = MetricsLog(run.metrics, events, now=clock)
    events.emit(
        "run_started",
        name=name,
        algorithm=algorithm,
        model="models/tiny",
        num_steps=20,
        start_step=0,
        attempt=1,
        devices={"trainer": devices[0], "generator": devices[1]},
        ranks=devices[0],
        engines=devices[1],
        **identity(),
    )
    events.emit("startup", what="ray")
    events.emit("startup", what="ray", seconds=2.0)
    events.emit("startup", what="engine 0")
    for step in range(1, steps + 1):
        events.emit("phase", step=step, name="generation")
        clock.now += STEP_SECONDS
        log.write("step", step, metrics(step))
        if step % 5 == 0:
            log.write("validation", step, {"validation/accuracy": 0.4 + step / 50, "validation/prompts": 100})
            events.emit("checkpoint", step=step, path=f"runs/{name}/checkpoints/step_{step}", seconds=0.3)
    if ended is not None:
        events.emit("run_ended", status=ended, reason="", next=[f"rlctl runs show runs/{name}"])
    return run
