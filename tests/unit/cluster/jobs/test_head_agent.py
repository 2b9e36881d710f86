"""The agent that serves runs on a cluster's head node, as far as it needs no Ray."""

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from rlctl.cluster.jobs import head_agent
from rlctl.cluster.jobs.submit import Operation
from rlctl.dashboard.state import read_state
from rlctl.launch.runtime import LocalRuntime
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError
from rlctl.telemetry.events import EventLog

CONFIG = "kind: sft\nrun: {dir: runs, name: mine}\nmodel: {path: some/model}\n"


class JobApi(BaseHTTPRequestHandler):
    """Stand-in for Ray's job API. Every job has the state `status`, and bodies of requests are recorded."""

    status: ClassVar[dict[str, Any]] = {}
    bodies: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.bodies.append(json.loads(self.rfile.read(size) or "null"))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.status).encode())

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def job_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve a job API and return its port."""
    monkeypatch.setattr(JobApi, "bodies", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), JobApi) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def make_run(folder: Path, *kinds: str) -> Path:
    """Make the directory of a run with events of these kinds."""
    run = folder / "mine"
    run.mkdir()
    (run / "config.yaml").write_text("kind: sft\n")
    JobRecord("lab", "mine-1", str(folder), called="runs/mine").write(run)
    for kind in kinds:
        EventLog(run / "events.jsonl").emit(kind)
    return run


@pytest.mark.parametrize("kinds", [("submitted",), ("submitted", "run_started"), ("run_ended", "submitted")])
def test_a_driver_that_is_gone_without_a_word_is_marked(
    tmp_path: Path, job_api: int, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    run = make_run(tmp_path, *kinds)
    before = read_state(run).status
    request = make_request(tmp_path, dashboard=job_api, run=str(run))
    monkeypatch.setattr(JobApi, "status", {"status": "FAILED", "message": "line\nkilled by signal 9\n"})
    head_agent.status({**request, "job": "mine-0"})
    assert read_state(run).status == before
    assert head_agent.status({**request, "job": "mine-1"})["message"] == "line\nkilled by signal 9"
    state = read_state(run)
    assert (state.status, state.end["reason"]) == ("failed", "its driver is gone: killed by signal 9")
    assert state.end["next"] == ["rlctl train sft --resume runs/mine --cluster lab"]
    events = (run / "events.jsonl").read_text()
    head_agent.status({**request, "job": "mine-1"})
    assert (run / "events.jsonl").read_text() == events


def test_a_run_that_was_submitted_again_is_new_until_its_driver_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, "submitted", "run_started", "run_ended")
    assert read_state(run).status == "failed"
    EventLog(run / "events.jsonl").emit("submitted", job="mine-2", cluster="lab")
    assert read_state(run).status == "new"


def make_request(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "token").write_text("secret")
    return {
        "cluster": "lab",
        "config": CONFIG,
        "resume": None,
        "work": str(folder),
        "files": None,
        "storage": None,
        "called": None,
        "secrets": {"KEY": "value"},
        "flags": [],
        "dashboard": 1,
        "token_path": str(folder / "token"),
        **changes,
    }


def test_secrets_rest_in_a_file_of_the_owners_alone(
    tmp_path: Path, job_api: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = make_request(tmp_path, dashboard=job_api)
    path = Path(head_agent.accept(request)["run"]) / head_agent.SECRETS
    assert json.loads(path.read_text()) == {"KEY": "value"}
    assert path.stat().st_mode & 0o777 == 0o600
    other_config = CONFIG.replace("mine", "other")
    path = Path(head_agent.accept({**request, "config": other_config, "secrets": {}})["run"]) / head_agent.SECRETS
    assert not path.exists()
    assert len(JobApi.bodies) == 2
    assert "value" not in json.dumps(JobApi.bodies)


def test_a_job_of_any_run_name_is_asked_for_by_a_plain_url(
    tmp_path: Path, job_api: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reply = head_agent.accept(make_request(tmp_path, dashboard=job_api, config=CONFIG.replace("mine", "Ünïcode+1")))
    assert Path(reply["run"]).name == "Ünïcode+1" and Path(reply["run"]).is_dir()
    assert re.fullmatch(r"_n_code_1-1-[0-9a-f]{6}", reply["job"]) and JobApi.bodies[-1]["submission_id"] == reply["job"]


def test_a_run_that_cannot_be_submitted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = CONFIG
    request = make_request(tmp_path)
    with pytest.raises(OSError, match="refused"):
        head_agent.accept(request)
    assert os.listdir(tmp_path / "runs") == []
    run = tmp_path / "runs" / "mine"
    run.mkdir()
    assert "run.name=mine is in use" in head_agent.accept(request)["problems"][0]

    (run / "config.yaml").write_text(config)
    with pytest.raises(OSError, match="refused"):
        head_agent.accept({**request, "resume": str(run), "config": config.replace("some", "other")})
    # The run's own config is the one that it last went on with.
    assert (run / "config.yaml").read_text() == config
    assert "other/model" in (run / head_agent.CONFIG).read_text()


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    claim = run.claim()
    with pytest.raises(RunDirError, match="is being driven already"):
        run.claim()
    os.close(claim)
    os.close(run.claim())


def test_a_run_of_a_cluster_is_not_gone_on_with_beside_its_driver(tmp_path: Path) -> None:
    run = make_run(tmp_path, "submitted")
    with pytest.raises(RunDirError, match=r"is driven by job mine-1: stop it .*, or add --cluster lab$"):
        LocalRuntime().refuse(RunDir(run))
    EventLog(run / "events.jsonl").emit("run_ended", status="interrupted")
    LocalRuntime().refuse(RunDir(run))
    JobRecord("lab", "mine-1", "/work", remote="/there/mine").write(run)
    with pytest.raises(RunDirError, match="is a copy of a run that lives on lab: add --cluster lab"):
        LocalRuntime().refuse(RunDir(run))


def test_the_head_knows_every_operation_that_it_is_asked_for() -> None:
    assert head_agent.OPERATIONS.keys() == set(get_args(Operation))
