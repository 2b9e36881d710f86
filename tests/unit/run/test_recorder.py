"""RunRecorder: the steps with validations and checkpoints, a checkpoint's score, and the order of records."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import CheckpointSection, ValidationSection
from rlctl.config.telemetry_schema import TelemetrySection
from rlctl.preflight.load import load
from rlctl.run.checkpoints import Checkpoint, CheckpointError
from rlctl.run.recorder import RunRecorder
from rlctl.run.run_dir import RunDir
from rlctl.sft.metric_rows import NLL
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.metrics import Metric, ReportChart, read_rows


def make_recorder(
    root: Path,
    *,
    every: int = 0,
    save_every: int = 0,
    at_end: bool = True,
    metric: str = "validation/accuracy",
    export: bool = False,
    record_tokens: bool = True,
    beside: bool = False,
) -> RunRecorder:
    run = RunDir.create("r", root)
    events = EventLog(run.events)
    checkpoint = CheckpointSection(
        every=save_every,
        at_end=at_end,
        keep_last=9,
        keep_best=0,
        metric=metric,
        export=export,
        export_dtype="bfloat16" if export else "auto",
        beside_training=beside,
    )
    validation = ValidationSection(every=every, at_start=False, num_generations=1, temperature=0.0, max_prompts=None)
    telemetry = TelemetrySection(
        dashboard="off",
        trackers=[],
        groups_per_step=1,
        groups_per_validation=2,
        record_tokens=record_tokens,
        rollouts_limit_mib=1,
        profile_updates=None,
    )
    config = replace(load("sft", None, []).config, checkpoint=checkpoint, validation=validation, telemetry=telemetry)
    return RunRecorder(run, events, MetricsLog(run.metrics, events), config)


class UnfinishedSave:
    """Stand-in for `TrainerSave` that has written its files once `release` is set. error: raised instead."""

    wait_cause = ""

    def __init__(self, error: Exception | None = None, release: threading.Event | None = None) -> None:
        self._error = error
        self._release = release

    def finish(self) -> dict[Path, tuple[int, str]]:
        if self._release:
            self._release.wait(20)
        if self._error:
            raise self._error
        return {}


def save(recorder: RunRecorder, step: int, state: dict[str, Any]) -> Checkpoint:
    recorder.save(step, state, write_parts)
    return recorder.checkpoints.all()[-1]


def write_parts(trainer: Path, export: Path | None, dtype: str | None, beside: bool) -> UnfinishedSave:
    (trainer / "weights").write_text("w")
    if export:
        export.mkdir()
        (export / "dtype").write_text(str(dtype))
        (export / "config.json").write_text('{"eos_token_id": 5}')
    return UnfinishedSave()


def list_records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def validate(recorder: RunRecorder, step: int, accuracy: float) -> None:
    with recorder.validation(step) as metrics:
        metrics["validation/accuracy"] = accuracy


def save_and_read_score(recorder: RunRecorder, step: int) -> float | None:
    score: float | None = save(recorder, step, {}).state["score"]
    return score


@pytest.mark.parametrize(("every", "due_steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_validation_comes_every_so_many_steps_and_after_the_last_unless_it_is_off(
    tmp_path: Path, every: int, due_steps: list[int]
) -> None:
    recorder = make_recorder(tmp_path, every=every)
    assert [step for step in range(1, 6) if recorder.validation_due(step, last=step == 5)] == due_steps


@pytest.mark.parametrize(("every", "due_steps"), [(0, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_a_checkpoint_comes_every_so_many_steps_and_always_after_the_last(
    tmp_path: Path, every: int, due_steps: list[int]
) -> None:
    recorder = make_recorder(tmp_path, save_every=every)
    assert [step for step in range(1, 6) if recorder.checkpoint_due(step, last=step == 5)] == due_steps


def test_without_a_checkpoint_at_the_end_only_the_turn_counts(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, save_every=2, at_end=False)
    assert [step for step in range(1, 6) if recorder.checkpoint_due(step, last=step == 5)] == [2, 4]


def test_the_score_is_the_named_metric_of_the_same_step(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    recorder.step(10, {"loss/nll": 2.0})
    validate(recorder, 10, 0.75)
    assert save_and_read_score(recorder, 10) == 0.75


def test_weights_that_were_not_measured_have_no_score(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    validate(recorder, 0, 0.5)
    recorder.step(1, {"loss/nll": 2.0})
    assert save_and_read_score(recorder, 1) is None


def test_a_leading_minus_makes_the_smaller_the_better(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, metric="-loss/nll")
    recorder.step(1, {"loss/nll": 2.0})
    assert save_and_read_score(recorder, 1) == -2.0


def test_a_zero_is_a_score(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    validate(recorder, 1, 0.0)
    assert save_and_read_score(recorder, 1) == 0.0


def test_a_validation_is_announced_before_and_recorded_after_with_its_seconds(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    run = RunDir(tmp_path / "r")
    with recorder.validation(3) as metrics:
        assert [event["kind"] for event in list_records(run.events)] == ["validation_started"]
        assert not run.metrics.exists()
        metrics["validation/accuracy"] = 0.5
    (record,) = list_records(run.metrics)
    assert (record["kind"], record["step"], record["validation/accuracy"]) == ("validation", 3, 0.5)
    assert record["time/validation"] >= 0


def test_a_validation_that_fails_leaves_no_record(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    with pytest.raises(RuntimeError, match="engine"), recorder.validation(3):
        raise RuntimeError("engine lost")
    assert not RunDir(tmp_path / "r").metrics.exists()


def test_a_step_ends_with_its_record_then_validation_then_checkpoint(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    run = RunDir(tmp_path / "r")
    recorder.step(2, {"loss/nll": 1.0})
    validate(recorder, 2, 0.5)
    saved = save(recorder, 2, {"version": 2})
    kinds = [(record["kind"], record["step"]) for record in list_records(run.metrics)]
    assert kinds == [("step", 2), ("validation", 2), ("checkpoint", 2)]
    events = list_records(run.events)
    assert [event["kind"] for event in events] == ["validation_started", "phase", "checkpoint"]
    assert events[-1]["path"] == str(saved.path) == str(run.checkpoints / "step_2")
    assert recorder.saved == 2


def test_a_checkpoint_holds_the_trainers_part_and_the_export_if_asked_for(tmp_path: Path) -> None:
    plain = save(make_recorder(tmp_path / "plain"), 1, {})
    assert (plain.trainer / "weights").exists() and not plain.export.exists()
    recorder = make_recorder(tmp_path / "exported", export=True)
    recorder.export_dtype = "bfloat16"
    recorder.end_tokens = (5, 7)
    exported = save(recorder, 1, {})
    assert (exported.export / "dtype").read_text() == "bfloat16"
    assert json.loads((exported.export / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


def test_a_checkpoint_that_fails_is_neither_announced_nor_counted_as_saved(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    run = RunDir(tmp_path / "r")

    def fill_disk(*_: object) -> UnfinishedSave:
        raise OSError("No space left on device")

    with pytest.raises(RuntimeError, match="no checkpoint of step 1"):
        recorder.save(1, {}, fill_disk)
    assert recorder.saved is None
    assert [event["kind"] for event in list_records(run.events)] == ["phase"]


def test_as_many_groups_as_the_config_says_are_written_behind_the_fates_of_all_tasks(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    run = RunDir(tmp_path / "r")
    recorder.outcomes(4, {"trained": ["a"], "filtered": {}})

    def make_groups(num_groups: int, with_tokens: bool) -> list[dict[str, Any]]:
        return [{"task": str(number), "rollouts": []} for number in range(num_groups)]

    recorder.groups(4, "train", make_groups)
    recorder.groups(4, "validation", make_groups)
    group = {"kind": "group", "step": 4, "rollouts": []}
    assert list_records(run.rollouts) == [
        {"kind": "prompts", "step": 4, "trained": ["a"], "filtered": {}},
        {**group, "purpose": "train", "task": "0"},
        {**group, "purpose": "validation", "task": "0"},
        {**group, "purpose": "validation", "task": "1"},
    ]


@pytest.mark.parametrize("record_tokens", [True, False])
def test_exact_tokens_are_recorded_if_the_config_says_so_and_trackers_never_get_them(
    tmp_path: Path, record_tokens: bool
) -> None:
    recorder = make_recorder(tmp_path, record_tokens=record_tokens)
    run = RunDir(tmp_path / "r")
    tracked_groups: list[dict[str, Any]] = []
    recorder.metrics.samples = lambda purpose, step, groups: tracked_groups.extend(groups)  # type: ignore[method-assign]

    def make_groups(num_groups: int, with_tokens: bool) -> list[dict[str, Any]]:
        group: dict[str, Any] = {"task": "a", "rollouts": []}
        if with_tokens:
            group["exact"] = {"rows": []}
        return [group]

    recorder.groups(4, "train", make_groups)
    assert ["exact" in group for group in list_records(run.rollouts)] == [record_tokens]
    assert tracked_groups == [{"task": "a", "rollouts": []}]


def test_a_save_beside_training_returns_before_it_is_whole_and_tells_its_seconds_when_it_is(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, beside=True)
    run = RunDir(tmp_path / "r")
    release = threading.Event()
    recorder.save(1, {}, lambda *_: UnfinishedSave(release=release))
    assert recorder.saved == 1 and recorder.checkpoints.latest() is None
    assert recorder.finish_save(wait=False) is None
    release.set()
    saved = recorder.finish_save()
    assert saved is not None and saved.path == run.checkpoints / "step_1"
    (record,) = list_records(run.metrics)
    assert record["kind"] == "checkpoint" and 0 < record["time/checkpoint_stopped"] < record["time/checkpoint"]
    assert recorder.finish_save() is None


def test_the_error_of_a_save_beside_training_is_raised_once_by_the_next(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, beside=True)
    recorder.save(1, {}, lambda *_: UnfinishedSave(OSError("No space left on device")))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1 .*No space left"):
        recorder.save(2, {}, write_parts)
    assert recorder.saved is None and not list(RunDir(tmp_path / "r").checkpoints.iterdir())
    recorder.save(3, {}, write_parts)
    assert recorder.finish_save() is not None


def test_a_state_that_cannot_be_copied_is_written_before_the_next_step_and_said_once(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, beside=True)
    run = RunDir(tmp_path / "r")

    def write_without_room(*arguments: Any) -> UnfinishedSave:
        unfinished_save = write_parts(*arguments)
        unfinished_save.wait_cause = "no room"
        return unfinished_save

    for step in (1, 2):
        recorder.save(step, {}, write_without_room)
        assert recorder.checkpoints.all()[-1].step == step
    assert [event["what"] for event in list_records(run.events) if event["kind"] == "warning"] == [
        "steps wait while checkpoints are written: no room"
    ]


def test_a_save_that_is_left_behind_takes_no_name(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, beside=True)
    run = RunDir(tmp_path / "r")
    release = threading.Event()
    recorder.save(1, {}, lambda *_: UnfinishedSave(release=release))
    threads = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert len(threads) == 1
    recorder.leave_save(0.01)
    release.set()
    threads[0].join(20)
    assert [path.name for path in run.checkpoints.iterdir()] == ["tmp_step_1"]
    assert list_records(run.events)[-1]["what"] == "the checkpoint of step 1 was not finished"


def test_a_save_that_fails_beside_an_error_of_the_run_is_told(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, beside=True)
    run = RunDir(tmp_path / "r")
    recorder.save(1, {}, lambda *_: UnfinishedSave(OSError("No space left on device")))
    recorder.leave_save(20)
    last = list_records(run.events)[-1]
    assert last["kind"] == "warning" and last["what"].startswith("no checkpoint of step 1 in ")
    assert last["what"].endswith("No space left on device")
    assert recorder.finish_save() is None


def test_the_metrics_of_a_users_part_are_in_the_runs_rows_and_undeclared_ones_are_told_once(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    recorder.declare([Metric("gate/mean", "mean of the gate", chart=ReportChart("My loss"))])
    for step in (1, 2):
        recorder.step(step, {"loss/nll": 2.0, "gate/mean": 1.0, "gate/spread": 0.5})
    with recorder.validation(2) as metrics:
        metrics |= {"validation/loss": 1.0, "gate/spread": 0.5}
    table = read_rows(tmp_path / "r" / "metric_rows.json")
    assert table
    assert table.meaning("gate/mean") == "mean of the gate" and table.meaning("loss/nll") == NLL.meaning
    events = list_records(tmp_path / "r" / "events.jsonl")
    warnings = [event["what"] for event in events if event["kind"] == "warning"]
    assert len(warnings) == 1 and warnings[0].startswith("metric gate/spread is not declared: ")
    metrics_records = list_records(tmp_path / "r" / "metrics.jsonl")
    assert [record["gate/spread"] for record in metrics_records] == [0.5, 0.5, 0.5]
