"""One damaged run is that run's own line: the others are listed, and no command ends with a traceback."""

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


def line(file: str, *texts: str) -> Callable[[Path], None]:
    def add(run: Path) -> None:
        with (run / file).open("a") as out:
            out.writelines(f"{text}\n" for text in texts)

    return add


def job(text: str) -> Callable[[Path], None]:
    return lambda run: (run / "job.json").write_text(text) and None  # type: ignore[func-returns-value]


def started(**fields: Any) -> Callable[[Path], None]:
    return line("events.jsonl", json.dumps({"time": 2e9, "kind": "run_started", "num_steps": 9, **fields}))


def unreadable(run: Path) -> None:
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()


# Each with the list's text; empty for none.
DAMAGE = {
    "a line nested too deep": (line("events.jsonl", DEEP), "events.jsonl: 1 damaged line left out"),
    "metrics nested too deep": (line("metrics.jsonl", DEEP), "metrics.jsonl: 1 damaged line left out"),
    "a step beyond all": (
        line("events.jsonl", STEP % ("checkpoint", "1e400")),
        "events.jsonl: 1 damaged line left out",
    ),
    "numbers that are none": (
        line("metrics.jsonl", *(STEP % ("step", each) for each in ("1e400", "NaN", "null", '"7"', "9" * 400, "[]"))),
        "metrics.jsonl: 6 damaged lines left out",
    ),
    "a start of no numbers": (started(start_step="many"), "events.jsonl: 1 damaged line left out"),
    "a kind that is none": (line("events.jsonl", '{"time": 1.0, "kind": {}}'), "events.jsonl: 1 damaged line left out"),
    "an event without host": (started(pid=4194303, start_id="b:1", start_step=0), ""),
    "a driver that is none": (started(pid="me", host=None), ""),
    "a checkpoint without its step": (
        line("events.jsonl", '{"time": 1.0, "kind": "checkpoint"}'),
        "events.jsonl: 1 damaged line left out",
    ),
    "a job that is no JSON": (job("{"), "job.json is damaged, so that no cluster is known"),
    "a job nested too deep": (job("[" * 100_000), "job.json is damaged"),
    "a job of other fields": (job('{"cluster": 3, "job": [], "work": {}}'), "job.json is damaged"),
    "a job that is no UTF-8": (lambda run: (run / "job.json").write_bytes(b"\xff"), "job.json is damaged"),
    "a config nested too deep": (lambda run: run.joinpath("config.yaml").write_text("[" * 5000), ""),
    "events that are a folder": (unreadable, "cannot be read: Is a directory"),
}


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_a_line_and_the_others_are_listed(tmp_path: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    write_run(tmp_path, "sound", ended="done")
    damage(write_run(tmp_path, "hurt", steps=3, ended=None).path)
    code, out, err = call("list", "--dir", tmp_path)
    assert code == 0 and {row.split()[0] for row in out.splitlines()} == {"name", "sound", "hurt"}
    assert "note: " in err and said in err and len(err.splitlines()) == 1 if said else not err
    assert call("list", "--dir", tmp_path, "--json")[0] == 0
    if name != "events that are a folder":
        for command in ("show", "dash"):
            assert call(command, "hurt", "--dir", tmp_path)[0] == 0


def test_a_run_with_a_damaged_job_is_watched_where_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, "hurt", steps=3, ended=None).path
    (run / "job.json").write_text("{")
    with follow_run(run) as following:
        assert not following.is_lost()


@pytest.mark.parametrize("name", [each for each in DAMAGE if "folder" not in each])
def test_a_damaged_run_is_stopped_or_refused_in_a_line(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, "hurt", steps=3, ended=None)
    DAMAGE[name][0](run.path)
    driver = subprocess.Popen(["sleep", "600"])
    try:
        text = run.events.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {driver.pid}')
        run.events.write_text(text.replace(start_id(os.getpid()), start_id(driver.pid)))
        result = CliRunner().invoke(app, ["stop", "hurt", "--dir", str(tmp_path)])
        if "job.json" in DAMAGE[name][1]:
            (only,) = result.stderr.splitlines()
            assert result.exit_code == 2 and only.startswith("error: ") and "job.json is damaged" in only
        elif "driver" in name or "host" in name:
            assert result.exit_code in (0, 2) and driver.poll() is None
        else:
            assert result.exit_code == 0 and driver.wait(60) == -signal.SIGTERM
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("name", [each for each in DAMAGE if "job" not in each and "folder" not in each])
def test_a_damaged_run_is_resumed(home: Path, name: str) -> None:
    config = load("grpo", "grpo.recipe.yaml", []).config
    run = write_run(home, "hurt", steps=3, ended="failed")
    run.events.write_text(run.events.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194303'))
    DAMAGE[name][0](run.path)
    with claim_run_dir(config, run.path) as found:
        found.truncate_metrics(2)
    assert [json.loads(each)["step"] for each in run.metrics.read_text().splitlines()] == [1, 2]


def test_a_resume_with_a_damaged_job_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create("hurt", home / "runs")
    run.config.write_text(load("grpo", "grpo.recipe.yaml", []).to_yaml())
    (run.path / "job.json").write_text("{")
    assert yaml.safe_load(run.config.read_text())["kind"] == "grpo"
    monkeypatch.setattr(sys, "argv", ["rlctl", "train", "grpo", "--resume", "hurt", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        answer()
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and lines[-2].startswith("error: ") and "job.json is damaged" in lines[-2]
