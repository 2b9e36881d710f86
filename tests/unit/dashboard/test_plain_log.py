"""The plain log without a terminal: one aligned line for each step."""

import io
import time
from pathlib import Path

import pytest

from rlctl.dashboard.plain_log import LineFormat
from rlctl.dashboard.state import read_state
from rlctl.dashboard.view import LineView
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from tests.unit.dashboard.synthetic import async_metrics, step_metrics


def make_record(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "time": float(step), **step_metrics(step)}


def test_the_columns_are_aligned_and_fit_80() -> None:
    head, line = LineFormat(1).lines(make_record(12))
    assert head == " step    time  reward    acc     loss      kl   grad    len mismatch tok/s/dev"
    assert line == "   12   2.50s   0.816  0.816  -0.0054   0.012  0.446 11.463  1.00030     1,195"
    assert len(head) == len(line) <= 80


def test_a_step_says_how_many_rewards_failed() -> None:
    _, line = LineFormat(1).lines({**make_record(12), "reward/failed": 12.0})
    assert line.endswith("     1,195  12 rewards failed")


def test_a_metric_that_is_missing_is_a_dash() -> None:
    _, line = LineFormat(1).lines({"kind": "step", "step": 1, "time": 0.0})
    assert line.split() == ["1", *["-"] * 9]


def test_the_header_comes_back_every_thirty_lines() -> None:
    line_format = LineFormat(1)
    steps_with_header = []
    for step in range(1, 92):
        lines = list(line_format.lines(make_record(step)))
        if len(lines) == 2:
            steps_with_header.append(step)
    assert steps_with_header == [1, 31, 61, 91]


def test_only_every_so_many_th_step_is_printed() -> None:
    line_format = LineFormat(5)
    assert [step for step in range(1, 16) if list(line_format.lines(make_record(step)))] == [5, 10, 15]


def test_the_last_step_is_printed_too() -> None:
    line_format = LineFormat(5)
    list(line_format.lines({"kind": "run_started", "model": "m", "num_steps": 3, "start_step": 0}))
    assert [step for step in range(1, 4) if list(line_format.lines(make_record(step)))] == [3]


def test_validation_is_a_line_of_its_own() -> None:
    record = {
        "kind": "validation",
        "step": 10,
        "time": 1.0,
        "validation/accuracy": 0.75,
        "validation/failed_rewards": 0,
    }
    (line,) = LineFormat(1).lines(record)
    assert line == "validation  step 10  accuracy 0.750"
    (line,) = LineFormat(1).lines(record | {"validation/failed_rewards": 2})
    assert line == "validation  step 10  accuracy 0.750 failed_rewards 2"


def test_a_checkpoint_is_one_line_of_its_event_and_its_record() -> None:
    event = {"kind": "checkpoint", "step": 4, "path": "/r/step_4", "seconds": 0.24}
    record = {"kind": "checkpoint", "step": 4, "time": 1.0, "time/checkpoint": 0.24}
    line_format = LineFormat(1)
    assert list(line_format.lines(event)) == ["checkpoint  of step 4 (0.24s) /r/step_4"]
    assert list(line_format.lines(record)) == []


def test_events_say_what_they_are_in_the_first_column() -> None:
    lines = LineFormat(1)
    assert list(lines.lines({"kind": "warning", "what": "disk is\nfull"})) == ["warning     disk is full"]
    assert list(lines.lines({"kind": "checkpoint", "step": 3, "path": "a/b", "seconds": 0.5})) == [
        "checkpoint  of step 3 (0.50s) a/b"
    ]
    assert list(lines.lines({"kind": "startup", "what": "ray", "seconds": 2.0})) == ["startup     ray 2.00s"]
    assert list(lines.lines({"kind": "engine_lost", "engine": 1})) == ["engine      1 lost"]
    assert list(lines.lines({"kind": "engine_gone", "engine": 1})) == ["engine      1 is gone"]
    scoring = {"kind": "engine_lost", "engine": 0, "role": "teacher"}
    assert list(lines.lines(scoring)) == ["engine      teacher's engine 0 lost"]
    event = {"kind": "refit_opened", "engines": ["engine-0"], "transport": "shm", "mode": "staged", "why": "on CPU"}
    assert list(lines.lines(event)) == ["refit       to engine-0: shm, staged (on CPU)"]


def test_the_processes_of_a_large_run_take_a_line_and_not_a_screen() -> None:
    lines = LineFormat(1)
    few = {"kind": "processes", "time": 1.0, **{f"engine-{index}": index for index in range(2)}}
    assert list(lines.lines(few)) == ["process ids engine-0 0 engine-1 1"]
    many = {"kind": "processes", "time": 1.0, **{f"engine-{index}": index for index in range(64)}}
    assert list(lines.lines(many)) == ["process ids of 64 processes, in events.jsonl"]
    engines = [f"engine-{index}" for index in range(64)]
    event = {"kind": "refit_opened", "engines": engines, "transport": "ipc", "mode": "direct", "why": "nothing runs"}
    assert list(lines.lines(event)) == ["refit       to 64 engines: ipc, direct (nothing runs)"]


def test_what_is_no_news_is_not_printed() -> None:
    lines = LineFormat(1)
    for event in ({"kind": "phase", "name": "train"}, {"kind": "startup", "what": "ray"}, {"kind": "prompts"}):
        assert not list(lines.lines(event))


def test_the_view_prints_what_is_written_while_it_runs_and_then_the_summary(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    EventLog(run.events, now=lambda: 99.0).emit("warning", what="of an earlier attempt")
    events = EventLog(run.events)
    out = io.StringIO()
    with LineView(run, every=1, since=100.0, out=out):
        events.emit("run_started", algorithm="grpo", model="tiny", num_steps=2)
        metrics = MetricsLog(run.metrics, events)
        metrics.write("step", 1, step_metrics(1))
        events.emit("warning", what="naïve")
        metrics.write("step", 2, step_metrics(2))
        events.emit("run_ended", status="done", next=["rlctl runs show " + "x" * 200])
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["run", "step", "1", "warning", "2"]
    assert "earlier attempt" not in out.getvalue()
    assert "a done" in lines[5]
    assert "  rlctl runs show " + "x" * 200 in lines


def test_a_restart_prints_the_steps_that_are_done_again_and_no_other(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    out = io.StringIO()
    times = iter(range(101, 200))
    metrics = MetricsLog(run.metrics, EventLog(run.events), now=lambda: float(next(times)))
    view = LineView(run, every=1, since=100.0, out=out)
    for step in (1, 2, 3):
        metrics.write("step", step, step_metrics(step))
    view.update()
    run.truncate_metrics(1)
    view.update()
    metrics.write("step", 2, step_metrics(2))
    view.update()
    metrics.write("validation", 2, {"validation/accuracy": 0.5})
    metrics.write("step", 3, step_metrics(3))
    view.update()
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step", "1", "2", "3", "2", "validation", "3"]


class ClosedPipe(io.StringIO):
    """A pipe whose reader goes away, as in `| head -2`. num_writes: those before the reader goes."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self.num_writes = num_writes

    def write(self, text: str) -> int:
        self.num_writes -= 1
        if self.num_writes < 0:
            raise BrokenPipeError
        return len(text)


@pytest.mark.parametrize("num_writes", [0, 2, 3])
def test_a_reader_that_goes_away_does_not_stop_the_run_and_is_told_nothing(
    tmp_path: Path, num_writes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create("a", tmp_path)
    with LineView(run, every=1, since=0.0, out=ClosedPipe(num_writes)):
        EventLog(run.events).emit("warning", what="unheard")
    assert capfd.readouterr().err == ""


def test_a_clock_that_is_set_back_hides_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create("a", tmp_path)
    clock = [time.time()]
    monkeypatch.setattr("rlctl.telemetry.events.time.time", lambda: clock[0])
    out = io.StringIO()
    events = EventLog(run.events)
    view = LineView(run, every=1, since=events.now(), out=out)
    events.emit("run_started", algorithm="grpo", model="tiny", num_steps=4)
    metrics = MetricsLog(run.metrics, events)
    metrics.write("step", 1, step_metrics(1))
    view.update()
    clock[0] -= 3600
    metrics.write("step", 2, step_metrics(2))
    view.update()
    clock[0] -= 3600
    resumed = EventLog(run.events)
    later_view = LineView(run, every=1, since=resumed.now(), out=out)
    resumed.emit("run_started", algorithm="grpo", model="tiny", num_steps=4, start_step=2)
    MetricsLog(run.metrics, resumed).write("step", 3, step_metrics(3))
    later_view.update()
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["run", "step", "1", "2", "run", "step", "3"]
    assert read_state(run.path).step == 3


def test_steps_of_an_asynchronous_run_have_columns_of_their_own() -> None:
    head, line = LineFormat(1).lines({"kind": "step", "step": 7, **async_metrics(7)})
    assert " ".join(head.split()).endswith("grad age idle t idle g mismatch tok/s/d")
    assert line.split()[6:9] == ["0.750", "60%", "40%"]
    assert len(head) == len(line) <= 80


def test_what_happens_in_an_asynchronous_or_compiled_run_is_told_in_words() -> None:
    line_format = LineFormat(1)
    assert list(line_format.lines({"kind": "redrawn", "time": 1.0, "prompt": "e0-r3", "version": 2})) == [
        "redrawn     prompt e0-r3 resampled: its group reached the bound on age"
    ]
    assert list(line_format.lines({"kind": "dispatch", "time": 1.0, "what": "compiled 0.4 ms a call"})) == [
        "dispatch    compiled 0.4 ms a call"
    ]
