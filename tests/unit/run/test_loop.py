"""`Loop`: the order of validation, steps and checkpoints, and the end of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import CheckpointSection, ValidationSection
from rlctl.config.telemetry_schema import TelemetrySection
from rlctl.data.cursor import Cursor
from rlctl.preflight.load import load
from rlctl.run.health import Ceiling, Health, HealthStop
from rlctl.run.loop import Loop
from rlctl.run.recorder import BegunSave, RunRecorder
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.metrics import Metric


class Saved:
    """Stand-in for `TrainerSave` whose files are already written."""

    wait_cause = ""

    def finish(self) -> dict[Path, tuple[int, str]]:
        return {}


class Diary(Loop):
    """Loop that records its calls. Each draw of data moves the cursor by one row."""

    def __init__(
        self,
        root: Path,
        *,
        steps: int,
        validate: int = 0,
        at_start: bool = False,
        save: int = 0,
        at_end: bool = True,
        stop: Callable[[list[str]], bool] = lambda _: False,
        ill_at: int = 0,
        broken_at: int = 0,
        skips: Sequence[Sequence[str]] = (),
    ) -> None:
        run = RunDir.create("r", root)
        events = EventLog(run.events)
        config = replace(
            load("sft", None, []).config,
            checkpoint=CheckpointSection(
                every=save,
                at_end=at_end,
                keep_last=9,
                keep_best=0,
                metric="loss",
                export=False,
                export_dtype="auto",
                beside_training=False,
            ),
            validation=ValidationSection(
                every=validate, at_start=at_start, num_generations=1, temperature=0.0, max_prompts=None
            ),
            telemetry=TelemetrySection(
                dashboard="off",
                trackers=[],
                groups_per_step=0,
                groups_per_validation=0,
                record_tokens=False,
                rollouts_limit_mib=1,
                profile_updates=None,
            ),
        )
        recorder = RunRecorder(run, events, MetricsLog(run.metrics, events), config)
        self.book: list[str] = []
        self.run_dir = run
        self._ill_at = ill_at
        self._broken_at = broken_at
        self._skips = skips
        recorder.declare([Metric("height", "height of the step")])
        self.checkpoints = recorder.checkpoints
        ceiling = Ceiling("height", "height", bound=2, message="height {value}, at most {bound}")
        super().__init__(
            num_steps=steps,
            recorder=recorder,
            cursor=Cursor(100, 0, False),
            write=self._save,
            stop=lambda: stop(self.book),
            health=Health([ceiling], stop=True),
        )

    def step(self) -> None:
        if self.done + 1 == self._broken_at:
            raise FloatingPointError("the loss is nan")
        self._cursor.draw(1)
        self.done += 1
        self.book.append(f"step {self.done}")
        skipped = self._count_skipped_updates(self.done, self._skips[self.done - 1]) if self._skips else {}
        self._recorder.step(self.done, {"height": 3.0 if self.done == self._ill_at else 1.0, **skipped})

    def validate(self) -> None:
        self.book.append(f"validate {self.done}")

    def close(self) -> None:
        self.book.append("close")

    def _save(self, *_: object) -> BegunSave:
        self.book.append(f"save {self.done}")
        return Saved()


def read_warnings(diary: Diary) -> list[dict[str, Any]]:
    return [event for event in read_records(diary.run_dir.events) if event["kind"] == "warning"]


def test_a_step_is_validated_before_it_is_saved(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=3, validate=2, at_start=True, save=2)
    diary.run(0)
    assert diary.book == [
        "validate 0",
        *("step 1", "step 2", "validate 2", "save 2"),
        *("step 3", "validate 3", "save 3"),
    ]


def test_a_resumed_run_goes_on_after_its_checkpoint_without_the_first_validation(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=3, validate=9, at_start=True)
    diary.run(2)
    assert diary.book == ["step 3", "validate 3", "save 3"]


def test_without_a_checkpoint_at_the_end_a_run_that_is_stopped_is_saved_all_the_same(tmp_path: Path) -> None:
    finished = Diary(tmp_path / "finished", steps=2, at_end=False)
    finished.run(0)
    assert finished.book == ["step 1", "step 2"]
    stopped = Diary(tmp_path / "stopped", steps=9, at_end=False, stop=lambda book: "step 2" in book)
    stopped.run(0)
    assert stopped.book == ["step 1", "step 2", "save 2"]


def test_a_run_that_is_already_done_does_nothing(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=3, validate=1, at_start=True, save=1)
    diary.run(3)
    assert diary.book == []


def test_validation_that_is_off_is_off_at_the_start_too(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=1, validate=0, at_start=True)
    diary.run(0)
    assert diary.book == ["step 1", "save 1"]


def test_a_stop_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=3, validate=1, at_start=True, stop=lambda _: True)
    diary.run(0)
    assert diary.book == []
    assert diary.checkpoints.latest() is None


@pytest.mark.parametrize("moment", ["step 2", "validate 2", "save 2"])
def test_a_stop_at_any_moment_ends_after_the_step_with_one_checkpoint_of_it(tmp_path: Path, moment: str) -> None:
    diary = Diary(tmp_path, steps=9, validate=2, save=2, stop=lambda book: moment in book)
    diary.run(0)
    assert diary.book == ["step 1", "step 2", "validate 2", "save 2"]


def test_a_stop_during_a_validation_is_saved_though_no_checkpoint_was_due(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=9, validate=2, stop=lambda book: "validate 2" in book)
    diary.run(0)
    assert diary.book == ["step 1", "step 2", "validate 2", "save 2"]


def test_a_stop_between_the_last_look_and_the_next_step_is_saved_too(tmp_path: Path) -> None:
    # Looks: before all, before step 1, for its validation, for its checkpoint, before step 2.
    looks = iter([False, False, False, False, True])
    diary = Diary(tmp_path, steps=9, validate=9, stop=lambda _: next(looks))
    diary.run(0)
    assert diary.book == ["step 1", "save 1"]


def test_a_checkpoint_says_where_the_data_goes_on(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=4)
    diary.run(0)
    latest = diary.checkpoints.latest()
    assert latest is not None and latest.state["version"] == 4
    resumed_cursor = Cursor(100, 0, False)
    resumed_cursor.load_state_dict(latest.state["cursor"])
    assert [draw.row for draw in resumed_cursor.draw(1)] == [4]


def test_a_run_whose_health_forbids_to_go_on_is_saved_and_says_why(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=9, ill_at=2)
    with pytest.raises(HealthStop, match=r"^step 2: height 3\.0, at most 2; the last checkpoint is of step 2$"):
        diary.run(0)
    assert diary.book == ["step 1", "step 2", "save 2"]
    (warning,) = read_warnings(diary)
    assert warning["what"] == "step 2: height 3.0, at most 2"
    assert (warning["check"], warning["step"], warning["value"], warning["bound"]) == ("height", 2, 3.0, 2)


def test_a_stop_for_health_does_not_save_twice(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=9, ill_at=2, save=1)
    with pytest.raises(HealthStop):
        diary.run(0)
    assert diary.book == ["step 1", "save 1", "step 2", "save 2"]


def test_a_run_that_its_health_stopped_stops_again_where_nothing_was_mended(tmp_path: Path) -> None:
    first = Diary(tmp_path / "first", steps=9, ill_at=2)
    with pytest.raises(HealthStop):
        first.run(0)
    latest = first.checkpoints.latest()
    assert latest is not None
    second = Diary(tmp_path / "second", steps=3, ill_at=3)
    second.resume(latest)
    with pytest.raises(HealthStop, match=r"^step 3: height 3\.0, at most 2; "):
        second.run(2)
    assert second.book == ["step 3", "save 3"]


def test_an_update_that_is_not_finite_stops_the_run_with_a_checkpoint_of_before(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=9, save=2, broken_at=4)
    with pytest.raises(HealthStop, match=r"^step 4: the loss is nan; the last checkpoint is of step 3$"):
        diary.run(0)
    assert diary.book == ["step 1", "step 2", "save 2", "step 3", "save 3"]


def test_in_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=9, broken_at=1)
    with pytest.raises(HealthStop, match=r"^step 1: the loss is nan; there is no checkpoint$"):
        diary.run(0)
    assert diary.book == []


def test_updates_without_an_optimizer_step_are_counted_and_each_cause_is_told_once(tmp_path: Path) -> None:
    diary = Diary(tmp_path, steps=4, skips=[["", ""], ["zero", ""], ["zero", "zero"], ["none", "zero"]])
    diary.run(0)
    assert [warning["what"] for warning in read_warnings(diary)] == [
        "step 2: no optimizer step, for zero; further ones are counted only (train/skipped_updates)",
        "step 4: no optimizer step, for none; further ones are counted only (train/skipped_updates)",
    ]
    steps = [record for record in read_records(diary.run_dir.metrics) if record["kind"] == "step"]
    assert [step["train/skipped_updates"] for step in steps] == [0, 1, 2, 2]
