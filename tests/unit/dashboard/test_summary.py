"""The summary at a run's end: a table of results, and the commands to type next."""

import io
import json
from pathlib import Path

from rich.console import Console

from rlctl.dashboard.state import read_state
from rlctl.dashboard.summary import print_summary
from rlctl.telemetry.events import EventLog, MetricsLog
from tests.unit.dashboard.synthetic import START, async_metrics, on_engines, step_metrics, write_run


def read_summary(path: Path, width: int = 80) -> str:
    out = io.StringIO()
    print_summary(read_state(path), Console(file=out, width=width))
    return out.getvalue()


def test_it_tells_what_was_reached_and_what_it_cost(tmp_path: Path) -> None:
    text = " ".join(read_summary(write_run(tmp_path).path).split())
    for part in (
        "grpo--tiny--1 done",
        "20 of 20 in 50s",
        "validation accuracy 50.0% → 80.0% (step 5 → 20)",
        "best checkpoint runs/grpo--tiny--1/checkpoints/step_20 (validation/accuracy 0.800)",
        "effective 1,200 · training 6,000 · generation 2,500 tokens/s/device",
        "2.50s: generation 60% · train 32% · other 8%",
        "idle trainer 60.0% · generator 40.0%",
        "trainer 0.40 GiB · engine 1.10 GiB",
    ):
        assert part in text, part


def test_a_run_whose_groups_had_equal_rewards_says_that_there_was_little_to_learn(tmp_path: Path) -> None:
    def read_summary_with(uniform_share: float) -> str:
        uniform = {"groups/uniform": uniform_share}
        run = write_run(tmp_path, f"run-{uniform_share}", metrics=lambda step: {**step_metrics(step), **uniform})
        return read_summary(run.path)

    assert "little to learn" not in read_summary_with(0.5)
    assert "little to learn" in read_summary_with(1.0)


def test_commands_are_never_wrapped_and_keep_their_brackets(tmp_path: Path) -> None:
    run = write_run(tmp_path, ended=None)
    command = "rlctl train grpo --resume runs/a data.stop=[1,2] " + "x" * 100
    EventLog(run.events).emit("run_ended", status="interrupted", reason="Ctrl-C", next=[command])
    text = read_summary(run.path, width=60)
    assert f"  {command}\n" in text
    assert "interrupted: Ctrl-C" in text


def test_a_run_that_never_took_a_step_has_a_summary_too(tmp_path: Path) -> None:
    assert "0 of 20" in read_summary(write_run(tmp_path, steps=0, ended="failed").path)


def test_a_teacher_is_told_apart_by_place_with_its_share_of_a_step(tmp_path: Path) -> None:
    text = " ".join(read_summary(write_run(tmp_path, metrics=on_engines).path, width=120).split())
    assert "teacher its engines 0.50s, 20.0% of a step" in text
    assert "idle trainer 60.0% · generator 40.0% · teacher 75.0%" in text
    assert "peak memory trainer 0.40 GiB · engine 1.10 GiB · teacher 3.50 GiB · driver 0.50 GiB" in text

    def in_ranks(step: int) -> dict[str, float]:
        return {**step_metrics(step), "time/teacher": 0.25, "train/teacher": 0.5}

    text = " ".join(read_summary(write_run(tmp_path, "b", metrics=in_ranks).path, width=120).split())
    assert "teacher its passes 0.25s, 10.0% of a step · in training 0.50s, 20.0% of a step" in text


def test_an_asynchronous_run_is_told_by_its_ages_and_what_to_change(tmp_path: Path) -> None:
    text = " ".join(read_summary(write_run(tmp_path, metrics=async_metrics).path, width=120).split())
    assert "age of groups mean 0.750 · at most 2 steps · mixed versions 25.0%" in text
    assert "advice trainer waits 20% for stragglers: raise async.max_trajectory_age_steps" in text
    assert "mismatch" not in text
    probed = write_run(
        tmp_path / "probed", metrics=lambda step: {**async_metrics(step), "mismatch/parity": 1 + step / 1e4}
    )
    assert "parity 1.00200 at most (1 is exact), under equal weights" in " ".join(read_summary(probed.path).split())


def test_failed_rewards_are_counted(tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, float]:
        failed = 24.0 if step % 4 == 0 else 0.0
        return {**step_metrics(step), "reward/failed": failed, "reward/failed_share": failed / 32}

    run = write_run(tmp_path, metrics=metrics)
    assert "failed rewards" not in read_summary(write_run(tmp_path, "sound").path)
    later = MetricsLog(run.metrics, EventLog(run.events), now=lambda: START + 100)
    later.write("validation", 21, {"validation/failed_rewards": 3})
    text = " ".join(read_summary(run.path, width=120).split())
    assert "failed rewards 120 rollouts in 5 of 20 steps, at most 75.0% of a step's · 3 validation answers" in text


def test_a_last_validation_that_failed_is_no_result_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    log = MetricsLog(run.metrics, EventLog(run.events), now=lambda: START + 100)
    log.write(
        "validation", 21, {"validation/failed_rewards": 3.0, "validation/answers": 50.0, "validation/accuracy": 0.5}
    )
    text = " ".join(read_summary(run.path, 120).split())
    assert "last validation step 21: rewards failed for 3 of 50 answers " in text
    log.write("validation", 22, {"validation/failed_rewards": 50.0, "validation/answers": 50.0})
    text = " ".join(read_summary(run.path, 120).split())
    assert "last validation step 22: rewards failed for 50 of 50 answers, so that it has no accuracy" in text
    log.write("validation", 23, {"validation/failed_rewards": 0.0, "validation/accuracy": 0.5})
    assert "last validation" not in read_summary(run.path)


def test_one_validation_is_no_change(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=0)
    log = MetricsLog(run.metrics, EventLog(run.events), now=lambda: START + 100)
    log.write("validation", 0, {"validation/accuracy": 0.45})
    assert "validation accuracy 45.0% (step 0)" in " ".join(read_summary(run.path, 120).split())


def test_updates_without_an_optimizer_step_are_counted(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, metrics=lambda step: {**step_metrics(step), "train/skipped_updates": float(step % 4 == 0)}
    )
    text = " ".join(read_summary(run.path, 120).split())
    assert "skipped updates 5 without an optimizer step (train/skipped_updates)" in text


def test_warnings_of_the_runs_health_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, ended=None)
    warnings = [("grad_norm", 3), ("accuracy", 5)]
    warnings += [("grad_norm", step) for step in (7, 9, 12, 14)]
    for check, step in warnings:
        EventLog(run.events).emit("warning", what=f"step {step}: ...", check=check, step=step, value=2.0, bound=1.0)
    text = " ".join(read_summary(run.path).split())
    assert "warnings grad norm 5 times (step 3, 7, 9, ...) · accuracy (step 5)" in text
    start = json.loads(run.events.read_text().splitlines()[0])
    del start["kind"], start["time"]
    EventLog(run.events).emit("run_started", **{**start, "start_step": 4})
    assert "warnings grad norm (step 3)" in " ".join(read_summary(run.path).split())
