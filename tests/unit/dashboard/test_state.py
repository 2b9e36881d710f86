"""The state of a run, read from its files."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.dashboard.dashboard import render
from rlctl.dashboard.state import LIVE_POINTS, History, RunReader, best_checkpoint, read_state
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from tests.unit.dashboard.synthetic import STEP_SECONDS, write_run


def test_a_finished_run(tmp_path: Path) -> None:
    state = read_state(write_run(tmp_path).path)
    assert (state.status, state.step, state.num_steps, state.name) == ("done", 20, 20, "grpo--tiny--1")
    assert len(state.series("reward/mean")) == 20
    assert [step for step, _ in state.series("validation/accuracy")] == [5, 10, 15, 20]
    assert state.latest("validation/accuracy") == 0.8
    assert state.eta is None


def test_a_run_whose_process_lives_is_running_and_has_an_eta(tmp_path: Path) -> None:
    state = read_state(write_run(tmp_path, steps=12, ended=None).path)
    assert state.status == "running"
    state.now = float(state.last["time"])
    assert state.eta == pytest.approx(8 * STEP_SECONDS)


def test_a_run_without_an_end_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    text = run.events.read_text()
    run.events.write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 4194303'))
    state = read_state(run.path)
    assert state.status == "died"
    assert state.now == pytest.approx(float(state.last["time"]))


def read_start(run: RunDir) -> dict[str, Any]:
    """Return the first event of a run, which describes its start."""
    start, *_ = run.events.read_text().splitlines()
    return json.loads(start)  # type: ignore[no-any-return]


def replace_start(run: RunDir, start: dict[str, Any]) -> None:
    """Replace the first event of a run by `start`."""
    _, *later_events = run.events.read_text().splitlines()
    run.events.write_text("\n".join([json.dumps(start), *later_events]) + "\n")


def test_another_process_under_the_same_pid_fools_nobody(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    start = read_start(run)
    boot, _, ticks = start["start_id"].rpartition(":")
    for start_id in (f"{boot}:{int(ticks) - 1}", f"another-boot:{ticks}", ""):
        replace_start(run, {**start, "start_id": start_id})
        assert read_state(run.path).status == "died"


def test_a_driver_that_an_earlier_version_recorded_is_known_by_its_wall_clock_start(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    start = read_start(run)
    del start["start_id"]
    for create_time, status in ((psutil.Process().create_time(), "running"), (1000.0, "died"), ("?", "died")):
        replace_start(run, {**start, "create_time": create_time})
        assert read_state(run.path).status == status


def test_a_run_of_another_host_counts_as_running(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    replace_start(run, {**read_start(run), "host": "elsewhere", "pid": 4194303})
    assert read_state(run.path).status == "running"


def test_a_resumed_run_forgets_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=12, ended="interrupted")
    reader = RunReader(run.path)
    reader.poll()
    assert reader.state.step == 12
    run.truncate_metrics(10)
    events = EventLog(run.events)
    events.emit("run_started", algorithm="grpo", num_steps=20, start_step=10, attempt=2)
    MetricsLog(run.metrics, events).write("step", 11, {"reward/mean": 0.25})
    assert reader.poll()
    state = reader.state
    assert (state.status, state.step, state.latest("reward/mean")) == ("running", 11, 0.25)
    assert [step for step, _ in state.series("reward/mean")] == list(range(1, 12))
    assert not state.startup


def test_the_bound_on_the_mismatch_is_the_probes_where_it_had_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    assert read_state(run.path).mismatch_bound == 1.02
    EventLog(run.events).emit("probe", token_mult_prob_error=1.06, bound=1.12)
    assert read_state(run.path).mismatch_bound == 1.12


def test_an_event_without_a_kind_is_left_out_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    num_events = len(read_state(run.path).events)
    with run.events.open("a") as file:
        file.write('{"time": 1800000000.0, "what": "ray"}\n')
    state = read_state(run.path)
    assert (len(state.events), state.damaged["events.jsonl"]) == (num_events, 1)


def test_polling_without_news_says_so(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path).path)
    assert reader.poll()
    assert not reader.poll()


def test_start_up_knows_what_is_done_and_what_still_starts(tmp_path: Path) -> None:
    state = read_state(write_run(tmp_path, steps=0, ended=None).path)
    assert state.startup["ray"][1] == 2.0
    assert state.startup["engine 0"][1] is None


def test_an_empty_run_is_new(tmp_path: Path) -> None:
    state = read_state(tmp_path)
    assert (state.status, state.step) == ("new", 0)


@pytest.mark.parametrize(("metric", "best_step"), [("validation/accuracy", 20), ("-validation/accuracy", 5)])
def test_the_best_checkpoint_follows_the_configs_metric(metric: str, best_step: int, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.config.write_text(f"checkpoint:\n  metric: {metric}\n")
    checkpoint = best_checkpoint(read_state(run.path))
    assert checkpoint is not None and checkpoint[0] == best_step


def test_records_that_lack_what_they_need_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with run.metrics.open("a") as file:
        file.write('{"kind": "step", "time": 1.0}\n{"kind": "step", "step": "x", "time": 1.0}\n')
    with run.events.open("a") as file:
        file.write('{"kind": "phase"}\n')
    assert read_state(run.path).step == 20


def test_a_live_history_is_bounded_and_exact_in_its_newer_half() -> None:
    live = History(limit=100)
    unbounded = History()
    # The second pass is a file that is read again.
    for _ in range(2):
        for step in range(1, 2001):
            record = {"step": step, "x": step / 2, "kind": "step"}
            live.add(record)
            unbounded.add(record)
    points = live.series("x")
    assert len(points) <= 100 and points[0] == (1, 0.5)
    assert points[-50:] == unbounded.series("x")[-50:] == [(step, step / 2) for step in range(1951, 2001)]
    assert len(unbounded) == 2000 and unbounded.last["step"] == 2000 and len(unbounded.recent(2000)) < 2000
    unbounded.add({"step": 7, "y": 1.0})
    assert unbounded.series("y") == [(7, 1.0)] and [step for step, _ in unbounded.series("x")[5:7]] == [6, 8]
    unbounded.drop_after(6)
    assert list(unbounded.steps) == [1, 2, 3, 4, 5, 6] and "y" not in unbounded.names


@pytest.mark.parametrize("limit", [LIVE_POINTS, 50])
def test_a_live_view_follows_a_run_that_goes_far_back(limit: int, tmp_path: Path) -> None:
    """Draw the view after the restart too, before the loaded checkpoint cuts metrics off."""
    run = write_run(tmp_path, steps=400, ended=None, metrics=lambda step: {"time/step": 1.0})
    events = EventLog(run.events)
    for step in range(1, 401):
        events.emit("warning", step=step, check="entropy")
    reader = RunReader(run.path, limit=limit)
    reader.poll()
    state = reader.state
    assert state.step == 400
    assert list(state.checkpoints) == list(range(5, 401, 5))[-limit:]
    assert state.health == {"entropy": set(list(range(1, 401))[-limit:])}
    events.emit("run_started", algorithm="grpo", num_steps=1000, start_step=100, attempt=2)
    reader.poll()
    assert state.step == 100 and state.eta is not None
    render(state, 160, 50)
    run.truncate_metrics(100)
    reader.poll()
    steps = list(state.steps.steps)
    assert state.step == state.last["step"] == 100
    assert steps == sorted(set(steps)) and steps[-20:] == list(range(81, 101)) and len(steps) <= limit
