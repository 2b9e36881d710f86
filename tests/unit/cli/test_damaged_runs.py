"""A damaged run costs one line about this run. Other runs are listed, and no command ends with a traceback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlctl.cli.main import answer
from rlctl.cli.runs import app
from rlctl.cluster.jobs.watch import follow_run
from rlctl.launch.session import claim_run_dir
from rlctl.preflight.load import load
from rlctl.run.run_dir import RunDir
from rlctl.utils.process import start_id
from tests.unit.dashboard.synthetic import write_run

DEEP = '{"time": 1.0, "kind": "warning", "what": ' + "[" * 100_000 + "]" * 100_000 + "}"
STEP = '{"time": 1.0, "kind": "%s", "step": %s}'


def append_lines(file: str, *lines: str) -> Callable[[Path], None]:
    """Return a function that damages a run: it appends these lines to a file."""

    def damage(run: Path) -> None:
        with (run / file).open("a") as out:
            out.writelines(f"{line}\n" for line in lines)

    return damage


def write_file(file: str, content: bytes) -> Callable[[Path], None]:
    """Return a function that damages a run: it writes a file with this content."""

    def damage(run: Path) -> None:
        (run / file).write_bytes(content)

    return damage


def append_start(**fields: Any) -> Callable[[Path], None]:
    """Return a function that damages a run: it appends another event of a start."""
    return append_lines("events.jsonl", json.dumps({"time": 2e9, "kind": "run_started", "num_steps": 9, **fields}))


def turn_events_into_folder(run: Path) -> None:
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()


BAD_STEPS = [STEP % ("step", number) for number in ("1e400", "NaN", "null", '"7"', "9" * 400, "[]")]
# Name -> (function that damages a run, note that `runs list` shows; empty for no note).
DAMAGE = {
    "a line nested too deep": (append_lines("events.jsonl", DEEP), "events.jsonl: 1 damaged line left out"),
    "metrics nested too deep": (append_lines("metrics.jsonl", DEEP), "metrics.jsonl: 1 damaged line left out"),
    "a step beyond all": (
        append_lines("events.jsonl", STEP % ("checkpoint", "1e400")),
        "events.jsonl: 1 damaged line left out",
    ),
    "numbers that are none": (
        append_lines("metrics.jsonl", *BAD_STEPS),
        "metrics.jsonl: 6 damaged lines left out",
    ),
    "a start of no numbers": (append_start(start_step="many"), "events.jsonl: 1 damaged line left out"),
    "a kind that is none": (
        append_lines("events.jsonl", '{"time": 1.0, "kind": {}}'),
        "events.jsonl: 1 damaged line left out",
    ),
    "an event without host": (append_start(pid=4194303, start_id="b:1", start_step=0), ""),
    "a driver that is none": (append_start(pid="me", host=None), ""),
    "a checkpoint without its step": (
        append_lines("events.jsonl", '{"time": 1.0, "kind": "checkpoint"}'),
        "events.jsonl: 1 damaged line left out",
    ),
    "a job that is no JSON": (write_file("job.json", b"{"), "job.json is damaged, so that no cluster is known"),
    "a job nested too deep": (write_file("job.json", b"[" * 100_000), "job.json is damaged"),
    "a job of other fields": (
        write_file("job.json", b'{"cluster": 3, "job": [], "work": {}}'),
        "job.json is damaged",
    ),
    "a job that is no UTF-8": (write_file("job.json", b"\xff"), "job.json is damaged"),
    "a config nested too deep": (write_file("config.yaml", b"[" * 5000), ""),
    "events that are a folder": (turn_events_into_folder, "cannot be read: Is a directory"),
}
# Names of damages with which a run can still be stopped.
STOPPABLE = [name for name in DAMAGE if "folder" not in name]
# Names of damages with which a run can still be resumed.
RESUMABLE = [name for name in STOPPABLE if "job" not in name]


def call(*words: object) -> tuple[int, str, str]:
    """Return the exit code, output and errors of `rlctl runs` with these words."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_a_line_and_the_others_are_listed(tmp_path: Path, name: str) -> None:
    damage, note = DAMAGE[name]
    write_run(tmp_path, "sound", ended="done")
    damage(write_run(tmp_path, "hurt", steps=3, ended=None).path)
    code, out, err = call("list", "--dir", tmp_path)
    assert code == 0 and {row.split()[0] for row in out.splitlines()} == {"name", "sound", "hurt"}
    if note:
        assert "note: " in err and note in err and len(err.splitlines()) == 1
    else:
        assert not err
    assert call("list", "--dir", tmp_path, "--json")[0] == 0
    if name != "events that are a folder":
        for command in ("show", "dash"):
            assert call(command, "hurt", "--dir", tmp_path)[0] == 0


def test_a_run_with_a_damaged_job_is_watched_where_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, "hurt", steps=3, ended=None).path
    (run / "job.json").write_text("{")
    with follow_run(run) as following:
        assert not following.is_lost()


@pytest.mark.parametrize("name", STOPPABLE)
def test_a_damaged_run_is_stopped_or_refused_in_a_line(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, "hurt", steps=3, ended=None)
    damage, note = DAMAGE[name]
    damage(run.path)
    driver = subprocess.Popen(["sleep", "600"])
    try:
        text = run.events.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {driver.pid}')
        run.events.write_text(text.replace(start_id(os.getpid()), start_id(driver.pid)))
        result = CliRunner().invoke(app, ["stop", "hurt", "--dir", str(tmp_path)])
        if "job.json" in note:
            (error,) = result.stderr.splitlines()
            assert result.exit_code == 2 and error.startswith("error: ") and "job.json is damaged" in error
        elif "driver" in name or "host" in name:
            assert result.exit_code in (0, 2) and driver.poll() is None
        else:
            assert result.exit_code == 0 and driver.wait(60) == -signal.SIGTERM
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_damaged_run_is_resumed(home: Path, name: str) -> None:
    config = load("grpo", "grpo.recipe.yaml", []).config
    run = write_run(home, "hurt", steps=3, ended="failed")
    run.events.write_text(run.events.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194303'))
    damage, _ = DAMAGE[name]
    damage(run.path)
    with claim_run_dir(config, run.path) as claimed_run:
        claimed_run.truncate_metrics(2)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2]


def test_a_resume_with_a_damaged_job_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create("hurt", home / "runs")
    run.config.write_text(load("grpo", "grpo.recipe.yaml", []).to_yaml())
    (run.path / "job.json").write_text("{")
    assert yaml.safe_load(run.config.read_text())["kind"] == "grpo"
    monkeypatch.setattr(sys, "argv", ["rlctl", "train", "grpo", "--resume", "hurt", "--dry-run"])
    with pytest.raises(SystemExit) as exit_info:
        answer()
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and lines[-2].startswith("error: ") and "job.json is damaged" in lines[-2]
