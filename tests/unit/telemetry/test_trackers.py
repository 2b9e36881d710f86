"""Trackers get all metrics, and an error of a tracker does not harm the run."""

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest

from rlctl.config.telemetry_schema import TensorBoardSection, UserTrackerSection, WandbSection
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import Guarded, open_trackers
from tests.unit.telemetry.test_clock import HandClock

# Code of a user's tracker.
NOTES = """
class Notes:
    def __init__(self, run, config, prefix):
        self.file = run / "notes"
        self.beginning = prefix + config["a"]

    def write(self, kind, step, metrics):
        self.file.write_text(f"{self.beginning} {kind} {step} {metrics}")

    def close(self):
        pass
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("a", tmp_path)


def read_warnings(run: RunDir) -> list[str]:
    return [event["what"] for event in read_records(run.events)]


def test_tensorboard_files_hold_every_scalar(run: RunDir) -> None:
    events = EventLog(run.events)
    (tracker,) = open_trackers([TensorBoardSection("tensorboard")], run.path, {}, events)
    tracker.write("step", 3, {"loss/policy": 0.5, "version": 3})
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    assert [(scalar.step, scalar.value) for scalar in reader.Scalars("loss/policy")] == [(3, 0.5)]
    assert [scalar.value for scalar in reader.Scalars("version")] == [3.0]
    assert read_warnings(run) == []


def test_a_tracker_that_is_not_installed_is_one_warning(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "rlctl.telemetry.trackers.wandb", raising=False)
    (tracker,) = open_trackers(
        [WandbSection("wandb", "p", None, None, [], None, None)], run.path, {}, EventLog(run.events)
    )
    tracker.write("step", 1, {"a": 1.0})
    tracker.close()
    failure, skipped_records = read_warnings(run)
    assert failure.startswith("wandb failed: ModuleNotFoundError: ")
    assert failure.endswith(": at its start; it is off; pip install 'rlctl[wandb]'")
    assert skipped_records == "wandb missed the numbers of 1 records; metrics.jsonl has them"


class Flaky:
    """Tracker whose calls raise `errors` in turn; None raises nothing. It records the steps of successful calls."""

    def __init__(self, errors: Sequence[Exception | None] = ()) -> None:
        self.errors = list(errors)
        self.steps = list[int]()
        self.calls = 0

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.steps.append(step)

    def close(self) -> None:
        pass


def test_a_record_that_a_tracker_refuses_costs_that_record_alone(run: RunDir) -> None:
    flaky = Flaky([None, ConnectionError("no\nroute to 10.0.0.1"), None, ConnectionError("no route to 10.0.0.2")])
    tracker = Guarded("flaky", lambda: flaky, EventLog(run.events))
    for step in range(1, 7):
        tracker.write("step", step, {})
    tracker.close()
    assert flaky.steps == [1, 3, 5, 6]
    # The second failure has the same cause, so there is no second warning.
    assert read_warnings(run) == [
        "flaky failed: ConnectionError: no route to 10.0.0.1: the numbers of step 2 are skipped there, and counted; "
        "the next are tried",
        "flaky missed the numbers of 2 records; metrics.jsonl has them",
    ]


def test_a_tracker_that_goes_on_failing_is_tried_less_and_less_and_takes_records_again(run: RunDir) -> None:
    clock = HandClock()
    flaky = Flaky([TimeoutError()] * 15)
    tracker = Guarded("flaky", lambda: flaky, EventLog(run.events), clock)
    for second in range(3600):
        clock.now = float(second)
        tracker.write("step", second, {})
    tracker.close()
    # 1 + 2 + 4 + ... + 256 s, and then a try every 5 minutes.
    assert flaky.calls == 15 + len(flaky.steps) and flaky.steps[0] == 0 + 1 + 511 + 5 * 300
    assert flaky.steps == list(range(flaky.steps[0], 3600))
    assert len(read_warnings(run)) == 2 and f"numbers of {flaky.steps[0]} records" in read_warnings(run)[1]


def test_a_tracker_whose_server_is_down_at_the_start_is_started_later(run: RunDir) -> None:
    flaky = Flaky()
    starts = count(1)

    def start() -> Flaky:
        if next(starts) == 1:
            raise ConnectionError("refused")
        return flaky

    tracker = Guarded("flaky", start, EventLog(run.events))
    for step in range(3):
        tracker.write("step", step, {})
        tracker.samples("train", step, [])
    tracker.close()
    assert flaky.steps == [0, 1, 2]
    assert read_warnings(run) == [
        "flaky failed: ConnectionError: refused: at its start; it is started again with the next records"
    ]


def test_rollouts_that_a_tracker_cannot_take_leave_it_its_numbers_and_causes_are_bounded(run: RunDir) -> None:
    class NumbersTracker(Flaky):
        def samples(self, purpose: str, step: int, groups: object) -> None:
            raise ValueError("no table " + "x" * step)

    numbers = NumbersTracker()
    clock = HandClock()
    tracker = Guarded("numbers", lambda: numbers, EventLog(run.events), clock)
    for step in range(20):
        clock.now += 1000
        tracker.write("step", step, {})
        tracker.samples("train", step, [])
    tracker.close()
    assert numbers.steps == list(range(20))
    assert len(read_warnings(run)) == 6 and read_warnings(run)[-1] == (
        "numbers missed the rollouts of 20 records; rollouts.jsonl has them"
    )


def test_wandb_gets_its_project_and_the_config(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a file of its name in the place of the package, which would call home; the file writes down its calls."""
    (run.path / "wandb.py").write_text(
        "def Settings(**_): ...\n"
        "class Run:\n    def define_metric(self, *_, **__): ...\n"
        "def init(**keys):\n"
        "    open(keys['dir'] + '/init_call', 'w').write(f\"{keys['project']} {keys['id']} {keys['config']}\")\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(run.path)
    for name in ("wandb", "rlctl.telemetry.trackers.wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    open_trackers([WandbSection("wandb", "p", None, None, [], None, None)], run.path, {"a": 1}, EventLog(run.events))
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.delitem(sys.modules, "rlctl.telemetry.trackers.wandb")
    assert (run.path / "init_call").read_text() == "p a {'a': 1}" and read_warnings(run) == []


def test_a_tracker_of_the_users_own_gets_the_keys_of_its_entry(run: RunDir) -> None:
    file = run.path / "notes_of_mine.py"
    file.write_text(NOTES)
    section = UserTrackerSection(f"{file}:Notes", {"prefix": "p"})
    (tracker,) = open_trackers([section], run.path, {"a": "b"}, EventLog(run.events))
    tracker.write("step", 3, {"x": 1.0})
    assert (run.path / "notes").read_text() == "pb step 3 {'x': 1.0}"
    open_trackers([UserTrackerSection(f"{file}:Notes", {"sufix": "p"})], run.path, {}, EventLog(run.events))
    (warning,) = read_warnings(run)
    assert "Notes failed: TypeError" in warning and "sufix" in warning


def test_groups_of_rollouts_reach_tensorboard_as_text_and_no_tracker_without_a_place_for_them(run: RunDir) -> None:
    rollout = {"index": 0, "text": [["49", True], [" tool: 7", False]], "reward": 1.0, "finish": "stop", "tokens": 2}
    groups = [{"task": "e0-r1", "prompt": "15+34=", "answer": "49", "rollouts": [rollout]}]
    events = EventLog(run.events)
    (tracker,) = open_trackers([TensorBoardSection("tensorboard")], run.path, {}, events)
    tracker.samples("train", 3, groups)
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    (tensor,) = reader.Tensors("rollouts/train")
    text = tensor.tensor_proto.string_val[0].decode()
    assert tensor.step == 3 and "    15+34=\n" in text and "49⟦ tool: 7⟧" in text

    (run.path / "notes_too.py").write_text(NOTES)
    (notes,) = open_trackers(
        [UserTrackerSection(f"{run.path}/notes_too.py:Notes", {"prefix": ""})], run.path, {"a": ""}, events
    )
    notes.samples("train", 3, groups)
    assert read_warnings(run) == []
