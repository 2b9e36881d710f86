"""Trackers get the numbers and can do no harm."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers import Guarded, open_trackers


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("a", tmp_path)


def warnings(run: RunDir) -> list[str]:
    return [event["what"] for event in read_records(run.events)]


def test_tensorboard_files_hold_every_scalar(run: RunDir) -> None:
    events = EventLog(run.events)
    (tracker,) = open_trackers(run.path, events, {}, tensorboard=True, wandb_project=None)
    tracker.write("step", 3, {"loss/policy": 0.5, "version": 3})
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss/policy")] == [(3, 0.5)]
    assert [scalar.value for scalar in read.Scalars("version")] == [3.0]
    assert warnings(run) == []


def test_a_tracker_that_is_not_installed_is_one_warning(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tracker,) = open_trackers(run.path, EventLog(run.events), {}, tensorboard=False, wandb_project="p")
    tracker.write("step", 1, {"a": 1.0})
    tracker.close()
    (what,) = warnings(run)
    assert what.startswith("wandb is off from now on") and what.endswith("pip install 'rlctl[wandb]'")


def test_a_tracker_that_fails_to_write_is_one_warning_and_then_silent(run: RunDir) -> None:
    class Broken:
        def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError("no\nroute")

        def close(self) -> None:
            raise ConnectionError

    tracker = Guarded("broken", Broken, EventLog(run.events))
    for step in range(3):
        tracker.write("step", step, {})
    tracker.close()
    assert warnings(run) == ["broken is off from now on: ConnectionError: no route"]


def test_none_are_opened_unasked(run: RunDir) -> None:
    assert open_trackers(run.path, EventLog(run.events), {}, tensorboard=False, wandb_project=None) == []
