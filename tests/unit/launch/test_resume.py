"""The files of a run after a resume that succeeds or fails. No test starts Ray, because the runs' bodies do nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.errors import ConfigError
from rlctl.launch.assembly import find_model, launch
from rlctl.launch.resume import find_resumed, replace_lost_model
from rlctl.launch.runtime import LocalRuntime
from rlctl.launch.session import Session, run_session
from rlctl.preflight.load import load
from rlctl.run.checkpoints import Checkpoints, Known
from rlctl.run.file_manifest import write_manifest
from rlctl.run.run_dir import JobRecord, RunDirError
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.utils.process import identity
from rlctl.workers.errors import WorkerDied
from tests.unit import folders

Body = Callable[[Session], None]


class WrittenPart:
    """Stand-in for `TrainerSave` whose files are already written."""

    wait_cause = ""

    def finish(self) -> Known:
        return {}


def write_export(folder: Path, export: Path | None, dtype: str | None, beside: bool) -> WrittenPart:
    """Write a checkpoint with no state of a trainer."""
    assert export
    export.mkdir()
    (export / "config.json").write_text("{}")
    return WrittenPart()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run that was saved after steps 2 and 4 and has recorded step 5."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))

    def body(session: Session) -> None:
        assert session.start == 0 and not session.resumed
        for step in (1, 2, 3, 4, 5):
            session.recorder.step(step, {})
            session.recorder.outcomes(step, {})
            if step in (2, 4):
                session.recorder.save(step, {}, write_export)
        raise RuntimeError("lost")

    config = load(
        "grpo", "grpo.recipe.yaml", ["run.name=mine", "telemetry.dashboard=off", "checkpoint.beside_training=false"]
    )
    assert run_session(config.settled, config.to_yaml(), None, body) == 1
    return Path("runs/mine")


def resume(run: Path, body: Body, *overrides: str) -> int:
    config = load("grpo", str(run / "config.yaml"), list(overrides), resume=True)
    return run_session(config.settled, config.to_yaml(), run, body)


def read_files(run: Path) -> dict[str, bytes]:
    """Return the contents of all files but events and logs."""
    paths = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith((".", "events"))]
    return {str(path): path.read_bytes() for path in paths if "logs" not in path.parts}


def read_steps(run: Path, name: str = "metrics") -> list[int]:
    return [record["step"] for record in read_records(run / f"{name}.jsonl") if record["kind"] != "checkpoint"]


def read_learning_rate(config: Path) -> float:
    learning_rate: float = yaml.safe_load(config.read_text())["trainer"]["optimizer"]["lr"]
    return learning_rate


def go_on(session: Session) -> None:
    session.commit_attempt()


def fail(session: Session) -> None:
    raise RuntimeError("the checkpoint does not load")


def test_a_resume_that_fails_leaves_the_run_as_it_was_and_keeps_what_was_asked(run: Path) -> None:
    files_before = read_files(run)
    assert resume(run, fail, "trainer.optimizer.lr=0.5") == 1
    assert read_files(run) == files_before
    assert read_learning_rate(run / "logs/attempt_2/config.yaml") == 0.5
    assert resume(run, go_on) == 0
    assert read_learning_rate(run / "config.yaml") == 1e-6


def test_a_resume_that_stands_keeps_its_config_and_cuts_what_it_does_again(run: Path) -> None:
    assert read_steps(run) == read_steps(run, "rollouts") == [1, 2, 3, 4, 5]

    def body(session: Session) -> None:
        assert session.start == 4
        assert len(read_steps(run)) == 5
        assert read_learning_rate(run / "config.yaml") == 1e-6
        session.commit_attempt()

    assert resume(run, body, "trainer.optimizer.lr=0.5") == 0
    assert read_steps(run) == read_steps(run, "rollouts") == [1, 2, 3, 4]
    assert read_learning_rate(run / "config.yaml") == 0.5


def test_a_run_without_a_checkpoint_keeps_no_record_of_its_first_validation(run: Path) -> None:
    """The resumed run validates step 0 again, so a record of the first validation would be a duplicate."""
    shutil.rmtree(run / "checkpoints")
    counts = []

    def list_groups(count: int, tokens: int) -> list[dict[str, Any]]:
        return [{"task": "r0", "prompt": "", "rollouts": []}]

    def body(session: Session) -> None:
        if session.resumed:
            session.commit_attempt()
        with session.recorder.validation(0) as metrics:
            session.recorder.groups(0, "validation", list_groups)
            metrics["validation/prompts"] = 1
        counts.append([len(read_steps(run)), len(read_steps(run, "rollouts"))])

    for _ in range(3):
        assert resume(run, body) == 0
    assert counts == [[1, 1]] * 3


def test_a_damaged_checkpoint_is_said_and_set_aside_once_an_older_one_stands(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints/step_4/state.json").write_text("")
    assert resume(run, fail) == 1
    assert (run / "checkpoints/step_4").is_dir()
    capsys.readouterr()

    def body(session: Session) -> None:
        assert session.start == 2
        session.commit_attempt()

    assert resume(run, body) == 0
    # The view of one process shows both attempts.
    warnings = list({line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")})
    assert len(warnings) == 1
    assert "step_4/state.json: empty, of" in warnings[0] and warnings[0].endswith("; going on after step 2 instead")
    assert read_steps(run) == [1, 2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["damaged_step_4", "step_2"]


def test_without_a_whole_checkpoint_nothing_starts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        os.truncate(run / f"checkpoints/step_{step}/state.json", 5)
    files_before = read_files(run)
    assert resume(run, lambda session: pytest.fail("it started")) == 2
    assert read_files(run) == files_before
    last_events = read_records(run / "events.jsonl")[-3:]
    errors = [event["what"] for event in last_events if event["kind"] == "error"]
    assert len(errors) == 1
    assert "step_4/state.json: cut to 5 of" in errors[0] and "step_2/state.json: cut to 5 of" in errors[0]
    assert errors[0].endswith("; to begin anew: rlctl train grpo runs/mine/config.yaml run.name=null")
    out = capsys.readouterr().out
    assert "Traceback" not in out
    assert out.endswith("\nNext steps\n  rlctl train grpo runs/mine/config.yaml run.name=null\n")


def test_a_restart_goes_through_the_same_door(run: Path) -> None:
    starts: list[int] = []

    def body(session: Session) -> None:
        starts.append(session.start)
        session.commit_attempt()
        if len(starts) == 1:
            (run / "checkpoints/step_4/state.json").write_text("{")
            raise WorkerDied("train", ["trainer-0"], "killed")

    assert resume(run, body, "run.max_restarts=1", "run.restart_backoff_s=0") == 0
    assert starts == [4, 2]
    assert read_steps(run) == [1, 2]
    # The run, its resume and the restart each have their logs.
    assert sorted(path.name for path in (run / "logs").glob("attempt_*")) == ["attempt_1", "attempt_2", "attempt_3"]


def test_rows_that_are_not_those_of_the_checkpoint_are_bad_input(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"made_with": {"rows": "other"}}
    Checkpoints(run / "checkpoints", 9, 0).save(6, state, lambda folder: None)
    assert resume(run, lambda session: session.depend_on_rows("ours")) == 2
    assert "its rows are not those that the cursor of the checkpoint of step 6" in capsys.readouterr().out


def test_what_a_checkpoint_depends_on_is_saved_with_it(run: Path) -> None:
    def body(session: Session) -> None:
        session.recorder.made_with = {"keys": {"run.seed": 0}}
        session.depend_on_rows("digest")
        session.recorder.save(6, {}, write_export)

    for name in ("step_2", "step_4"):
        (run / "checkpoints" / name).rename(run / f"{name}_gone")
    assert resume(run, body) == 0
    saved = json.loads((run / "checkpoints/step_6/state.json").read_text())
    assert saved["made_with"] == {"keys": {"run.seed": 0}, "rows": "digest"}


def test_a_run_that_a_cluster_drives_is_not_continued_here(run: Path) -> None:
    config = load("grpo", str(run / "config.yaml"), [], resume=True)
    files_before = read_files(run)
    JobRecord("lab", "sums-1", "/work", remote="/far/sums").write(run)
    with pytest.raises(RunDirError, match="is a copy of a run that lives on lab: add --cluster lab"):
        launch(config.settled, config.to_yaml(), LocalRuntime(), run)
    assert read_files(run).items() >= files_before.items()


@pytest.mark.parametrize("needs", ["nothing of the model", "its weights"])
def test_a_run_whose_model_is_gone_goes_on_with_the_newest_export(run: Path, needs: str) -> None:
    resumed = find_resumed(run, [])
    assert replace_lost_model(resumed) == []
    shutil.rmtree("model")
    if needs == "its weights":
        # A reference policy reads them, and so do adapters.
        state_file = run / "checkpoints/step_4/state.json"
        state = json.loads(state_file.read_text())
        state["made_with"] = {"frozen": "abc"}
        state_file.write_text(json.dumps(state))
        write_manifest(run / "checkpoints/step_4")
        assert replace_lost_model(resumed) == []
        with pytest.raises(ConfigError, match=r"model\.path: no file or folder .*/model;"):
            load("grpo", str(run / "config.yaml"), [], resume=True)
    else:
        assert replace_lost_model(resumed) == [f"model.path={run / 'checkpoints/step_4/hf'}"]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_run_keeps_the_checkpoint_of_another_run_and_prunes_its_own(run: Path, is_own: bool) -> None:
    shutil.copytree("model", run / "checkpoints/step_4/hf", dirs_exist_ok=True)
    checkpoint = run.absolute() / "checkpoints/step_4"
    if not is_own:
        checkpoint = Path(shutil.copytree(run, run.with_name("other"))).absolute() / "checkpoints/step_4"

    def body(session: Session) -> None:
        find_model(session.config, session.run_dir, session.checkpoint)
        Checkpoints(checkpoint.parent, 1, 0).save(6, {}, lambda folder: None)

    assert resume(run, body, f"model.path={checkpoint / 'hf'}") == 0
    assert checkpoint.exists() != is_own


@pytest.mark.parametrize(("end", "host"), [(None, "this"), (None, "far"), ("run_ended", "this")])
def test_a_start_from_a_run_that_still_trains_is_noted(run: Path, end: str | None, host: str) -> None:
    shutil.copytree("model", run / "checkpoints/step_4/hf", dirs_exist_ok=True)
    events = EventLog(run / "events.jsonl")
    driver = identity()
    if host != "this":
        driver["host"] = host
    events.emit("run_started", **driver)
    if end:
        events.emit(end)
    model = run.absolute() / "checkpoints/step_4/hf"
    composed = load("grpo", "grpo.recipe.yaml", [f"model.path={run}"])
    notes = [note for note in composed.notes if "still trains" in note]
    beginning = f"model.path={model}: that run still trains"
    condition = "once it has newer ones (its checkpoint.keep_last)"
    expected_notes = {
        "this": f"{beginning}: it keeps step_4 while this run lasts, then deletes it {condition}; a later resume with "
        "a reference policy or adapters needs it: copy the folder first",
        "far": f"{beginning} on far, and deletes step_4 {condition}: wait for its end, or copy the folder first",
    }
    if end:
        assert notes == []
    else:
        assert notes == [expected_notes[host]]
