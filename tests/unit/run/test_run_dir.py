"""Run directories: names of runs, attempts, and the records that a resume removes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.run.run_dir import RunDir, RunDirError, automatic_name, find_run


def test_a_name_in_use_is_refused_with_the_way_to_continue_it(tmp_path: Path) -> None:
    RunDir.create("a", tmp_path)
    with pytest.raises(RunDirError, match=f"continue it with --resume {tmp_path}/a") as refusal:
        RunDir.create("a", tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "-x"])
def test_a_name_must_be_a_plain_folder_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"run\.name="):
        RunDir.create(name, tmp_path)


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(RunDirError, match=r"^run\.dir=/proc/none: No such file or directory: choose another folder$"):
        RunDir.create("a", Path("/proc/none"))


def test_what_holds_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no such run"):
        RunDir.open(tmp_path / "none")
    with pytest.raises(RunDirError, match="no run directory"):
        RunDir.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "no YAML"),
        (b"a: " + b"[" * 20_000, "no YAML"),
        (b"- 1", "no config of a run"),
        (b"kind: grpo\nmodel: null\ndata: {}", "no config of a run"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_damaged_config_is_one_line_with_the_way_around_it(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    run = RunDir.create("a", tmp_path)
    if content is not None:
        run.config.write_bytes(content)
    with pytest.raises(RunDirError) as refusal:
        run.recorded_config()
    assert str(refusal.value) == f"{run.config}: damaged, {reason}; rename it to use the run's weights without it"


def test_each_attempt_has_logs_of_its_own_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    assert run.start_attempt() == 1
    (run.logs / "x.log").write_text("first")
    assert run.start_attempt() == 2
    assert run.logs.resolve() == (tmp_path / "a/logs/attempt_2").resolve()
    assert (tmp_path / "a/logs/attempt_1/x.log").read_text() == "first"
    assert run.attempt == 2


def test_whatever_else_lies_beside_the_attempts_is_ignored(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    run.start_attempt()
    for name in ("attempt_x", "attempt_", "attempt_2_old"):
        (run.path / "logs" / name).mkdir()
    assert run.start_attempt() == 2


def test_a_run_is_found_by_its_name_or_path_and_nearly(tmp_path: Path) -> None:
    for name in ("first", "second"):
        RunDir.create(name, tmp_path).config.write_text("")
    assert find_run("first", tmp_path) == find_run(str(tmp_path / "first"), tmp_path / "none") == tmp_path / "first"
    for text in ("frist", str(tmp_path / "frist")):
        with pytest.raises(RunDirError, match="frist: no such run; did you mean first"):
            find_run(text, tmp_path)
    with pytest.raises(RunDirError, match="no such run; `rlctl runs list` shows"):
        find_run("xyz", tmp_path)


def test_a_moved_run_keeps_its_latest_logs(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    run.start_attempt()
    run.path.rename(tmp_path / "b")
    assert RunDir(tmp_path / "b").logs.is_dir()


def test_automatic_names_count_up(tmp_path: Path) -> None:
    assert automatic_name("grpo", "Qwen/Qwen3-0.6B", tmp_path) == "grpo--qwen3-0.6b--1"
    for number in (1, 2, 10):
        RunDir.create(f"grpo--qwen3-0.6b--{number}", tmp_path)
    RunDir.create("grpo--qwen3-0.6b--mine", tmp_path)
    assert automatic_name("grpo", "Qwen/Qwen3-0.6B", tmp_path) == "grpo--qwen3-0.6b--11"


def test_a_run_from_a_checkpoint_is_named_after_the_run_and_its_step(tmp_path: Path) -> None:
    model = "runs/sft--qwen3-tiny--1/checkpoints/step_800/hf"
    assert automatic_name("grpo", model, tmp_path) == "grpo--sft-qwen3-tiny-1-step_800--1"
    assert automatic_name("grpo", "exports/hf", tmp_path) == "grpo--hf--1"
    model_of_long_name = model.replace("sft--qwen3-tiny--1", "grpo--sft-qwen3-tiny-1-step_800--1" * 6)
    name = automatic_name("grpo", model_of_long_name, tmp_path)
    RunDir.create(name, tmp_path)
    assert name.endswith("step_800--1") and len(name) < 100


def test_a_resume_drops_the_records_of_later_steps_and_torn_lines(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path)
    records: list[dict[str, Any]] = []
    for step in (1, 2, 3):
        records += [{"kind": "step", "step": step}, {"kind": "validation", "step": step}]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "step", "step": 2')
    run.truncate_metrics(2)
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == records[:4]
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_truncating_what_does_not_exist_is_no_error(tmp_path: Path) -> None:
    RunDir.create("a", tmp_path).truncate_metrics(0)
