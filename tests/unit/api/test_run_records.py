"""`RecordedRun` returns the records of a run as plain Python objects."""

import json
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl.run.run_dir import RunDirError


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def metrics_record(step: int, time: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "step", "step": step, "time": time, **metrics}


def group_record(step: int, purpose: str, reward: float) -> dict[str, Any]:
    rollout = {
        "index": 0,
        "text": [["4", True], [" is it?", False], ["2<eos>", True]],
        "tokens": 3,
        "finish": "stop",
        "reward": reward,
        "rewards": {"exact": reward},
        "right": reward == 1.0,
        "failed": None,
        "advantage": None,
        "versions": {"0": 3},
    }
    head = {"kind": "group", "step": step, "purpose": purpose, "task": "e0-r1"}
    return {**head, "prompt": "40+2=", "answer": "42", "rollouts": [rollout]}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[rlctl.RecordedRun]:
    """A run of three steps, of which the second was repeated after a resume."""
    path = tmp_path / "runs" / "sums"
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("kind: grpo\nmodel: {path: tiny}\ndata: {}\n")
    metrics = [
        metrics_record(1, 10.0, **{"reward/mean": 0.25}),
        metrics_record(2, 11.0, **{"reward/mean": 0.5}),
        {"kind": "validation", "step": 2, "time": 11.5, "validation/accuracy": 0.75},
        metrics_record(2, 12.0, **{"reward/mean": 0.625, "loss/kl": 0.5}),
        metrics_record(3, 13.0, **{"reward/mean": 1.0}),
    ]
    write_lines(path / "metrics.jsonl", metrics)
    groups = [group_record(1, "train", 1.0), group_record(2, "validation", 0.0), group_record(2, "train", 0.0)]
    write_lines(path / "rollouts.jsonl", groups)
    ending = {"kind": "run_ended", "time": 14.0, "status": "failed", "reason": "no room"}
    started = {"kind": "run_started", "time": 9.0, "name": "sums", "num_steps": 3, "host": "elsewhere", "pid": 1}
    write_lines(path / "events.jsonl", [started, ending])
    yield rlctl.load_run(path)


def test_metrics_are_columns_and_records_and_a_repeated_step_counts_once(run: rlctl.RecordedRun) -> None:
    metrics = run.metrics
    assert metrics.column("step") == [1, 2, 3]
    assert metrics.column("reward/mean") == [0.25, 0.625, 1.0]
    assert metrics[-1]["reward/mean"] == 1.0
    assert [record["step"] for record in metrics[:2]] == [1, 2]
    kl = metrics.column("loss/kl")
    assert isnan(kl[0]) and kl[1] == 0.5 and isnan(kl[2])
    assert list(metrics.to_dict()) == metrics.names == ["step", "reward/mean", "loss/kl"]
    assert metrics.meaning("reward/mean")
    with pytest.raises(KeyError, match="no metric reward/men; did you mean reward/mean"):
        metrics.column("reward/men")
    assert run.validations.column("validation/accuracy") == [0.75]


def test_rollouts_are_read_by_purpose_and_step(run: rlctl.RecordedRun) -> None:
    assert [(group.step, group.purpose) for group in run.rollouts()] == [(1, "train"), (2, "validation"), (2, "train")]
    (group,) = run.rollouts("train", step=2)
    (rollout,) = group.rollouts
    assert (group.prompt, group.answer, rollout.text) == ("40+2=", "42", "42<eos>")
    assert rollout.reward == 0.0 and rollout.is_right is False and rollout.failure is None
    assert rollout.rewards == {"exact": 0.0}
    assert group.exact_tokens() == []
    assert list(run.rollouts("validation", step=9)) == []


def test_status_reason_config_and_events_are_those_of_the_files(run: rlctl.RecordedRun) -> None:
    assert (run.name, run.status, run.reason) == ("sums", "failed", "no room")
    assert run.config["kind"] == "grpo"
    assert [event["kind"] for event in run.events] == ["run_started", "run_ended"]
    assert run.checkpoints == []
    assert repr(run) == "<run sums: failed, 3 steps>"


def test_a_folder_that_is_no_run_is_refused_with_the_nearest_name(run: rlctl.RecordedRun) -> None:
    with pytest.raises(RunDirError, match="no such run; did you mean sums"):
        rlctl.load_run(run.path.parent / "sum")
