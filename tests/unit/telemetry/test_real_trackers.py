"""Trackers against the packages themselves, offline: numbers, the config and groups as text, also after a resume.

A missing package is skipped. To have all: pip install -e '.[trackers]', then pytest -n 0
tests/unit/telemetry/test_real_trackers.py
"""

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.telemetry_schema import MlflowSection, SwanlabSection, TrackerSection, TrackioSection, WandbSection
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import open_trackers

CONFIG = {"run": {"seed": 7}, "rewards": [{"name": "exact"}], "long": "x" * 7000, **{f"key{n}": n for n in range(120)}}
GROUP = {
    "task": "e0-r1",
    "prompt": "15+34=",
    "answer": "49",
    "outcome": "trained",
    "rollouts": [
        {"index": 0, "text": [["49", True], ["tool: 7", False]], "reward": 1.0, "advantage": 0.5, "finish": "stop"},
        {"index": 1, "text": [["48 ÷ é", True]], "reward": None, "advantage": None, "finish": "length", "tokens": 3},
    ],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of a user without keys, whose home is empty."""
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return RunDir.create("a", tmp_path / "runs")


def track_steps(run: RunDir, section: TrackerSection, steps: range) -> None:
    """Track some steps as a run does, and find no warning."""
    events = EventLog(run.events)
    log = MetricsLog(run.metrics, events, open_trackers([section], run.path, CONFIG, events))
    for step in steps:
        log.write("step", step, {"loss/policy": 1 / step, "reward/exact/mean": 0.5})
        log.samples("train", step, [GROUP, GROUP])
        log.write("validation", step, {"validation/accuracy": 0.25})
    log.close()
    assert [event["what"] for event in read_records(run.events)] == []


def read_wandb(log: Path) -> list[Any]:
    """Return the records of an offline run's file: LevelDB's log format, blocks of 32 KiB with a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = log.read_bytes()
    offset = 7
    parts = b""
    records = list[Any]()
    while offset + 7 <= len(content):
        _, length, part_kind = struct.unpack("<IHB", content[offset : offset + 7])
        if part_kind:
            parts += content[offset + 7 : offset + 7 + length]
        if part_kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
        offset += 7 + length
        rest_of_block = 32768 - offset % 32768
        # A block's end that is too short for a header is filled up.
        if rest_of_block < 7:
            offset += rest_of_block
    return records


def test_mlflow_has_a_run_with_its_parameters_metrics_and_groups(run: RunDir) -> None:
    pytest.importorskip("mlflow", reason="pip install 'rlctl[mlflow]'")
    from mlflow.tracking import MlflowClient

    section = MlflowSection("mlflow", "mine", None)
    track_steps(run, section, range(1, 4))
    track_steps(run, section, range(4, 5))
    client = MlflowClient(f"sqlite:///{run.path.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    assert (mlflow_run.info.run_name, mlflow_run.info.status) == ("a", "FINISHED")
    params = mlflow_run.data.params
    assert (params["run.seed"], params["rewards.0.name"]) == ("7", "exact")
    history = client.get_metric_history(mlflow_run.info.run_id, "loss/policy")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    text = next((run.path / "mlflow-artifacts").rglob("train_000004.txt")).read_text()
    assert "15+34=" in text and "49⟦tool: 7⟧" in text and "48 ÷ é" in text


def test_trackio_has_a_run_in_its_database(run: RunDir) -> None:
    # It reads TRACKIO_DIR when it is imported, which no other test does.
    trackio = pytest.importorskip("trackio", reason="pip install 'rlctl[trackio]'")
    section = TrackioSection("trackio", "mine", None)
    track_steps(run, section, range(1, 4))
    track_steps(run, section, range(4, 5))
    store = trackio.SQLiteStorage
    logs = store.get_logs("mine", "a")
    assert [log["step"] for log in logs if "loss/policy" in log] == [1, 2, 3, 4]
    assert "tool: 7" in str(logs) and store.get_run_config("mine", "a")["run"] == {"seed": 7}


def test_swanlab_writes_a_run_into_the_run_directory(run: RunDir) -> None:
    pytest.importorskip("swanlab", reason="pip install 'rlctl[swanlab]'")
    track_steps(run, SwanlabSection("swanlab", "mine", "offline"), range(1, 3))
    texts = [path.read_text() for path in (run.path / "swanlab").rglob("media/text/*.txt")]
    assert len(texts) == 2 and all("49⟦tool: 7⟧" in text for text in texts)
    assert any(b"reward/exact/mean" in path.read_bytes() for path in (run.path / "swanlab").rglob("*.swanlab"))


def test_wandb_writes_an_offline_run_with_a_table_of_rollouts(run: RunDir) -> None:
    pytest.importorskip("wandb", reason="pip install 'rlctl[wandb]'")
    section = WandbSection("wandb", "mine", "team", "sweep", ["first", "tiny"], None, "chosen")
    track_steps(run, section, range(1, 3))
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    assert folder.name.endswith("-chosen")
    tables = [path.read_text() for path in folder.rglob("*.table.json")]
    assert len(tables) == 2 and "15+34=" in tables[0] and "tool: 7" in tables[0]
    (log,) = folder.glob("*.wandb")
    # Since 0.31 a process of wandb's own writes the file after `finish` has returned.
    end = time.monotonic() + 30
    while b"reward/exact/mean" not in log.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.1)
    records = read_wandb(log)
    # Every number has the training step as its axis, the held-out ones too.
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    axes = {metric.glob_name: metric.step_metric for metric in metrics}
    assert axes["*"] == "step"
    (wandb_run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (wandb_run.entity, wandb_run.run_group, list(wandb_run.tags)) == ("team", "sweep", ["first", "tiny"])
