"""A run's session with a body of a few lines in the place of training: its files and its last words."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlctl.cli.main import app
from rlctl.launch.assembly import announce
from rlctl.launch.session import Session, run_session
from rlctl.preflight.load import load
from rlctl.preflight.placement import place, requested_resources, this_machine
from rlctl.run.checkpoints import Checkpoints

SECRET = "a-secret-of-the-environment"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not permitted: {mount.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def run_body(recipe: str, root: Path, body: Callable[[Session], None]) -> int:
    """Return the exit code of a run called `x` in `root`, which is announced and then does `body`."""
    composed = load("sft", recipe, [f"run.dir={root}", "run.name=x", "telemetry.dashboard=off"])

    def announce_and_do_body(session: Session) -> None:
        announce(session, place(this_machine(0), requested_resources(composed.settled)))
        body(session)

    return run_session(composed.settled, composed.to_yaml(), None, announce_and_do_body)


def read_events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_a_full_disk_is_named_at_the_end_with_the_way_on_and_the_run_has_failed(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(session: Session) -> None:
        Checkpoints(session.run_dir.checkpoints, 1, 0).save(1, {}, lambda folder: None)
        with (small_disk / "ballast").open("wb") as file, pytest.raises(OSError, match="No space"):
            file.write(b"1" * 2**20)
        # The records of other work have no room either.
        for _ in range(200):
            session.events.emit("warning", what="x" * 100)
        (session.run_dir.checkpoints / "step_2").write_bytes(b"1" * 2**16)

    assert run_body("sft-tiny", small_disk, fill) == 1
    output = capfd.readouterr()
    last_words = output.out[output.out.index("x failed") :]
    assert "x failed: [Errno 28] No space left on device; make room there, then resume; " in last_words
    assert " records could not be written" in last_words
    assert f"rlctl train sft --resume {small_disk / 'x'}" in last_words
    assert "running" not in last_words
    assert "cannot write" in output.err
    (run,) = json.loads(CliRunner().invoke(app, ["runs", "list", "--json", "--dir", str(small_disk)]).stdout)
    assert run["status"] == "failed"


def test_a_resume_at_once_prints_nothing_of_the_attempt_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(session: Session) -> None:
        raise RuntimeError("the first reason")

    def go_on(session: Session) -> None:
        session.events.emit("warning", what="of the second attempt")

    composed = load("sft", "sft-tiny", [f"run.dir={tmp_path}", "run.name=x", "telemetry.dashboard=off"])
    assert run_session(composed.settled, composed.to_yaml(), None, fail) == 1
    assert "error       the first reason" in capfd.readouterr().out
    assert run_session(composed.settled, composed.to_yaml(), tmp_path / "x", go_on) == 0
    out = capfd.readouterr().out
    assert "of the second attempt" in out and "the first reason" not in out


@pytest.mark.parametrize(
    ("is_training", "promise"),
    [(False, "ending the start, with nothing new to save"), (True, "finishing this step and saving")],
)
def test_a_first_signal_promises_a_save_only_once_steps_are_made(
    tmp_path: Path, is_training: bool, promise: str
) -> None:
    def interrupt(session: Session) -> None:
        if is_training:
            session.end_start()
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 20
        while "again: stop now" not in session.run_dir.events.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        session.lose("Ray is gone")
        session.lost = ""

    assert run_body("sft-tiny", tmp_path, interrupt) == 130
    warnings = [event["what"] for event in read_events(tmp_path / "x") if event["kind"] == "warning"]
    assert warnings == [f"Ctrl-C: {promise}; again: stop now", f"Ray is gone: {promise}"]


def test_a_start_that_is_stopped_because_ray_is_gone_has_failed(tmp_path: Path) -> None:
    def lose_ray(session: Session) -> None:
        with session.interrupts.ends_block():
            session.lose("Ray is gone")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    assert run_body("sft-tiny", tmp_path, lose_ray) == 1
    end = read_events(tmp_path / "x")[-1]
    assert (end["status"], end["reason"]) == ("failed", "Ray is gone")


def test_what_comes_from_the_environment_is_on_no_disk_and_a_resume_reads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_TEST_SECRET", SECRET)
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        "defaults: sft-tiny.yaml\n"
        "data: {system_prompt: '${oc.env:RLCTL_TEST_SECRET}'}\n"
        "checkpoint: {metric: 'validation/${data.system_prompt}'}\n"
        "sft: {num_steps: 8}\n"
        "validation: {every: '${sft.num_steps}'}\n"
    )
    system_prompts = []

    def fail(session: Session) -> None:
        system_prompts.append(session.config.data.system_prompt)
        raise RuntimeError("the reason")

    assert run_body(str(recipe), tmp_path / "runs", fail) == 1
    assert system_prompts == [SECRET]
    run = tmp_path / "runs" / "x"
    assert run.stat().st_mode & 0o777 == 0o700
    texts = {path: path.read_text() for path in run.rglob("*") if path.is_file()}
    assert len(texts) >= 3
    assert [path for path, text in texts.items() if SECRET in text] == []
    assert "system_prompt: ${oc.env:RLCTL_TEST_SECRET}  # from " in texts[run / "config.yaml"]
    assert "\n  every: 8  # from " in texts[run / "config.yaml"]
    resumed_config = load("sft", str(run / "config.yaml"), [], resume=True).config
    assert resumed_config.data.system_prompt == SECRET
    assert resumed_config.checkpoint.metric == f"validation/{SECRET}"


@pytest.mark.parametrize(
    ("last_step", "expected_command"),
    [(0, "rlctl train sft --resume {run}"), (800, "rlctl train sft --resume {run} sft.num_steps=1600")],
)
def test_a_run_offers_more_steps_only_when_its_own_are_done(
    tmp_path: Path, last_step: int, expected_command: str
) -> None:
    """A probe ends before the first step."""

    def train(session: Session) -> None:
        if last_step:
            session.recorder.metrics.write("step", last_step - 1, {})
            session.recorder.metrics.write("step", last_step, {})

    assert run_body("sft-tiny", tmp_path, train) == 0
    assert read_events(tmp_path / "x")[-1]["next"][-1] == expected_command.format(run=tmp_path / "x")
