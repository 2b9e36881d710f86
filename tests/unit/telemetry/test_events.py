"""Events and metrics, as they are written to a run's files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rlctl.telemetry.events import EventLog, MetricsLog, as_number
from rlctl.telemetry.jsonl import read_records


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl", now=lambda: 5.0)


def test_an_event_is_its_time_its_kind_and_its_fields(events: EventLog, tmp_path: Path) -> None:
    events.emit("phase", step=3, name="train")
    assert read_records(tmp_path / "events.jsonl") == [{"time": 5.0, "kind": "phase", "step": 3, "name": "train"}]


def test_a_field_that_json_does_not_know_is_written_as_text(events: EventLog, tmp_path: Path) -> None:
    events.emit("checkpoint", path=Path("a/b"))
    assert read_records(tmp_path / "events.jsonl")[0]["path"] == "a/b"


def test_metrics_are_one_flat_record(events: EventLog, tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m.jsonl", events, now=lambda: 9.0).write("step", 4, {"loss/policy": np.float32(0.5)})
    assert read_records(tmp_path / "m.jsonl") == [{"kind": "step", "step": 4, "time": 9.0, "loss/policy": 0.5}]


def test_a_value_that_is_no_finite_number_is_one_warning_a_name(events: EventLog, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", events)
    for step in (1, 2):
        log.write("step", step, {"good": 1, "nan": float("nan"), "list": [1, 2], "array": np.zeros(3)})
    assert all(set(record) == {"kind", "step", "time", "good"} for record in read_records(tmp_path / "m.jsonl"))
    warnings = [event["what"] for event in read_records(tmp_path / "events.jsonl")]
    assert len(warnings) == 3
    assert [warning.split()[1] for warning in warnings] == ["nan", "list", "array"]


def test_trackers_get_what_was_written(events: EventLog, tmp_path: Path) -> None:
    writes: list[tuple[str, int, dict[str, float]]] = []

    class Recorder:
        def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
            writes.append((kind, step, dict(metrics)))

        def close(self) -> None:
            writes.append(("closed", 0, {}))

    log = MetricsLog(tmp_path / "m.jsonl", events, [Recorder()])
    log.write("validation", 2, {"validation/accuracy": 0.5, "bad": None})
    log.close()
    assert writes == [("validation", 2, {"validation/accuracy": 0.5}), ("closed", 0, {})]


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3), (0.5, 0.5), (True, 1), (np.int64(7), 7), (np.array(2.0), 2.0), ("3", None), (None, None), (1j, None)],
)
def test_scalars_of_any_library_are_numbers(value: object, number: float | None) -> None:
    assert as_number(value) == number


def test_infinity_is_no_number() -> None:
    assert as_number(float("inf")) is None
    assert as_number(np.float32("nan")) is None
