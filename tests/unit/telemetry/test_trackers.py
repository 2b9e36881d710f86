"""Trackers get the numbers and can do no harm."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlctl.config.telemetry_schema import TensorBoardSection, UserTrackerSection, WandbSection
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import Guarded, open_trackers

NOTES = """
class Notes:
    def __init__(self, run, config, prefix):
        self.file, self.line = run / "notes", prefix + config["a"]

    def write(self, kind, step, metrics):
        self.file.write_text(f"{self.line} {kind} {step} {metrics}")

    def close(self):
        pass
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("a", tmp_path)


def warnings(run: RunDir) -> list[str]:
    return [event["what"] for event in read_records(run.events)]


def test_tensorboard_files_hold_every_scalar(run: RunDir) -> None:
    events = EventLog(run.events)
    (tracker,) = open_trackers([TensorBoardSection("tensorboard")], run.path, {}, events)
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
    monkeypatch.delitem(sys.modules, "rlctl.telemetry.trackers.wandb", raising=False)
    (tracker,) = open_trackers([WandbSection("wandb", "p")], run.path, {}, EventLog(run.events))
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


def test_wandb_gets_its_project_and_the_config(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself would call home: a file of its name takes its place, and writes down what it is told."""
    (run.path / "wandb.py").write_text(
        "def Settings(**_): ...\n"
        "def init(**told):\n    open(told['dir'] + '/told', 'w').write(f\"{told['project']} {told['config']}\")\n"
    )
    monkeypatch.syspath_prepend(run.path)
    for name in ("wandb", "rlctl.telemetry.trackers.wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    open_trackers([WandbSection("wandb", "p")], run.path, {"a": 1}, EventLog(run.events))
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.delitem(sys.modules, "rlctl.telemetry.trackers.wandb")
    assert (run.path / "told").read_text() == "p {'a': 1}" and warnings(run) == []


def test_a_tracker_of_the_users_own_gets_the_keys_of_its_entry(run: RunDir) -> None:
    file = run.path / "notes_of_mine.py"
    file.write_text(NOTES)
    section = UserTrackerSection(f"{file}:Notes", {"prefix": "p"})
    (tracker,) = open_trackers([section], run.path, {"a": "b"}, EventLog(run.events))
    tracker.write("step", 3, {"x": 1.0})
    assert (run.path / "notes").read_text() == "pb step 3 {'x': 1.0}"
    open_trackers([UserTrackerSection(f"{file}:Notes", {"sufix": "p"})], run.path, {}, EventLog(run.events))
    (what,) = warnings(run)
    assert "Notes is off from now on: TypeError" in what and "sufix" in what


def test_groups_of_rollouts_reach_tensorboard_as_text_and_no_tracker_without_a_place_for_them(run: RunDir) -> None:
    rollout = {"index": 0, "text": [["49", True], [" tool: 7", False]], "reward": 1.0, "finish": "stop", "tokens": 2}
    groups = [{"task": "e0-r1", "prompt": "15+34=", "answer": "49", "rollouts": [rollout]}]
    events = EventLog(run.events)
    (tracker,) = open_trackers([TensorBoardSection("tensorboard")], run.path, {}, events)
    tracker.samples("train", 3, groups)
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    (written,) = read.Tensors("rollouts/train")
    text = written.tensor_proto.string_val[0].decode()
    assert written.step == 3 and "    15+34=\n" in text and "49⟦ tool: 7⟧" in text

    (run.path / "notes_too.py").write_text(NOTES)
    (mine,) = open_trackers(
        [UserTrackerSection(f"{run.path}/notes_too.py:Notes", {"prefix": ""})], run.path, {"a": ""}, events
    )
    mine.samples("train", 3, groups)
    assert warnings(run) == []
