"""Operations on the head: accept a run as a Ray job, report its status, stop it, and list active runs.

They are called through `remote_scripts/head.py`. Secrets arrive in a request and are stored in a private file until the
driver has read them. They are not in the job's environment, because Ray shows that to everybody who may see the job.
"""

import base64
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil
import yaml

from rlctl.dashboard.run_list import list_row
from rlctl.dashboard.state import read_state
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError, automatic_name
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.utils.files import write_private, write_whole
from rlctl.utils.process import driver_lives
from rlctl.utils.ray_token import token_here

_HTTP_S = 20.0
SECRETS = "job.env"
# File with the config of the job. It becomes the run's config.yaml when the run continues.
CONFIG = "job.yaml"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def accept(request: dict[str, Any]) -> dict[str, Any]:
    """Submit a run as a Ray job. Reply: run (its directory), job, attempt; or problems (one line each) if it was
    refused.

    request: cluster, config (YAML), resume (a run directory or null), work (working directory), files (a zip in base64,
    or null), storage (base folder for a relative run.dir; null: `work`), called (folder of runs on the submitting
    machine, or null), secrets (name -> value), flags (of rlctl.cli.job), and the fields of `_http`.
    """
    work = Path(request["work"]).expanduser()
    problems = []
    # Without files the cluster shares the submitting machine's, where the config was checked before.
    if request["files"] is not None:
        work.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(request["files"]))) as packed:
            packed.extractall(work)
        problems = _config_problems(request["config"], work, request["secrets"])
    if problems:
        return _refuse(request, work, problems)
    try:
        os.chdir(work)
        run, is_new = _place_run(request)
        claim = RunDir(run).claim()
    except RunDirError as error:
        return _refuse(request, work, [str(error)])
    try:
        return _hand_over(request, run, work, is_new)
    except BaseException as error:
        (run / SECRETS).unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(run, ignore_errors=True)
        else:
            EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=f"not submitted: {error}", next=[])
        # Remove the files that came with the request.
        _refuse(request, work, [])
        raise
    finally:
        # Release the run's lock. The driver takes it.
        os.close(claim)


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Return the job's status as Ray names it. If the driver was killed, record the end of the run."""
    try:
        ray_job = _http(request, f"/api/jobs/{request['job']}")
    except FileNotFoundError:
        ray_job = {"status": "FAILED", "message": "its cluster was restarted"}
    if ray_job["status"] in _ENDED:
        _mark_ended(Path(request["run"]), request["job"], ray_job)
    return {"status": ray_job["status"], "message": (ray_job.get("message") or "").strip()}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Stop a job: its driver finishes the step, saves and ends. With `now` the driver is killed.

    Reply: stopped, true if the job was running.
    """
    run = Path(request["run"])
    if request["now"] and _is_driven_here(run):
        psutil.Process(read_state(run).start["pid"]).kill()
    return {"stopped": bool(_http(request, f"/api/jobs/{request['job']}/stop", method="POST")["stopped"])}


def runs(request: dict[str, Any]) -> dict[str, Any]:
    """Return the runs that are active on the cluster.

    Each has path, job, devices (counts of trainer and generator), and the fields of its row in `rlctl runs list`.
    """
    active_runs = []
    for job in _http(request, "/api/jobs/"):
        path = (job.get("metadata") or {}).get("rlctl_run")
        if path is None or job["status"] in _ENDED:
            continue
        state = read_state(Path(path))
        facts = {**vars(list_row(Path(path), state)), "devices": state.start.get("devices", {})}
        # A run with a last event is skipped: its driver is about to exit. A run that died counts as active, because
        # its driver was killed and Ray has not ended the job yet, so that its workers may still have the devices.
        if state.status in ("new", "running", "died"):
            active_runs.append({"path": path, "job": job["submission_id"], **facts})
    return {"runs": active_runs}


OPERATIONS = {"accept": accept, "status": status, "stop": stop, "runs": runs}


def _hand_over(request: dict[str, Any], run: Path, work: Path, is_new: bool) -> dict[str, Any]:
    """Write the job's files into the run's directory, and submit the job to Ray. Return the reply of `accept`."""
    record = JobRecord.read(run)
    attempt = max(record.attempt if record else 0, RunDir(run).attempt) + 1
    # The job's name is used in URLs and in names of Ray's files.
    job = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run.name)}-{attempt}-{token_hex(3)}"
    write_whole(run / CONFIG, request["config"])
    if is_new:
        write_whole(run / "config.yaml", request["config"])
    (run / SECRETS).unlink(missing_ok=True)
    if request["secrets"]:
        write_private(run / SECRETS, json.dumps(request["secrets"]))
    called = f"{request['called']}/{run.name}" if request["called"] else None
    JobRecord(request["cluster"], job, str(work), attempt, called=called).write(run)
    EventLog(run / "events.jsonl").emit("submitted", job=job, cluster=request["cluster"])
    command = [sys.executable, "-m", "rlctl.cli.job", str(run), *request["flags"]]
    body = {"submission_id": job, "entrypoint": shlex.join(command), "metadata": {"rlctl_run": str(run)}}
    try:
        _http(request, "/api/jobs/", body, method="POST")
    except OSError as error:
        # A busy head may have accepted the job and answered too late, so ask whether it has the job.
        try:
            _http(request, f"/api/jobs/{job}")
        except OSError:
            raise error from None
    return {"run": str(run), "job": job, "attempt": attempt}


def _refuse(request: dict[str, Any], work: Path, problems: list[str]) -> dict[str, Any]:
    """Remove the files that came with the request. Return the reply with the problems."""
    if request["files"] is not None:
        os.chdir("/")
        shutil.rmtree(work, ignore_errors=True)
    return {"problems": problems}


def _place_run(request: dict[str, Any]) -> tuple[Path, bool]:
    """Create or open the run's directory, and write run.dir and run.name into the request's config.

    Return (directory, True if it is new). Raises RunDirError.
    """
    config = yaml.safe_load(request["config"])
    if request["resume"] is not None:
        run = RunDir.open(Path(request["resume"])).path.resolve()
        _must_not_run(request, run)
        return run, False
    root = Path(request["storage"] or ".").expanduser().resolve() / config["run"]["dir"]
    name = config["run"]["name"] or automatic_name(config["kind"], config["model"]["path"], root)
    config["run"] |= {"dir": str(root), "name": name}
    request["config"] = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return RunDir.create(name, root).path, True


def _must_not_run(request: dict[str, Any], run: Path) -> None:
    """Raise RunDirError if a live job already drives the run."""
    record = JobRecord.read(run)
    if record is None:
        return
    if record.cluster != request["cluster"]:
        if read_state(run).status in ("new", "running"):
            raise RunDirError(f"{run} is a run of {record.cluster}: stop it there first, with `rlctl runs stop`")
        return
    try:
        is_driven = _http(request, f"/api/jobs/{record.job}")["status"] not in _ENDED
    except FileNotFoundError:
        # Ray forgot the job, because the cluster was restarted since.
        return
    if is_driven:
        raise RunDirError(f"{run} is still running (job {record.job}): watch it with `rlctl runs dash`")


def _http(request: dict[str, Any], path: str, body: Any = None, method: str = "GET") -> Any:
    """Call Ray's job API on the head's loopback and return its JSON answer.

    https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html. request: dashboard (port),
    token_path. Raises FileNotFoundError for an unknown job. Ray's own client is not used, because importing Ray takes
    longer than the call, and a status is asked for every few seconds.
    """
    token = token_here(Path(request["token_path"]))
    http_request = urllib.request.Request(
        f"http://127.0.0.1:{request['dashboard']}{urllib.parse.quote(path)}",
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        },
        method=method,
    )
    try:
        # Proxies are disabled, because the API is on this host.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(http_request, timeout=_HTTP_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise FileNotFoundError(path) from None
        lines = error.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"Ray's job API says {error.code}: {lines[-1] if lines else error.reason}") from None


def _config_problems(config: str, work: Path, secrets: dict[str, str]) -> list[str]:
    """Return the errors of `rlctl config check` for a config, in the folder `work` and with the run's secrets."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config)
        file.flush()
        command = [sys.executable, "-m", "rlctl.cli.main", "config", "check", file.name]
        done = subprocess.run(
            command, cwd=work, env={**os.environ, **secrets}, capture_output=True, text=True, check=False
        )
        lines = [line.replace(f"{file.name}:", "line ") for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors or done.returncode == 0:
        return errors
    # The command crashed: the last line of its traceback says why.
    return lines[-1:]


def _is_driven_here(run: Path) -> bool:
    """Return True if the driver of the run's newest attempt runs on this machine."""
    start = read_state(run).start
    return bool(start.get("host") == socket.gethostname() and driver_lives(start))


def _mark_ended(run: Path, job: str, ray_job: dict[str, Any]) -> None:
    """Emit `run_ended` for a driver that was killed before it could. Do nothing if another job drives the run now."""
    record = JobRecord.read(run)
    if record is None or record.job != job:
        return
    (run / SECRETS).unlink(missing_ok=True)
    if _is_driven_here(run):
        # The driver has lost Ray's head, but still runs: it records the end itself.
        return
    kinds = [event.get("kind") for event in read_records(run / "events.jsonl")]
    # Only the events of the newest attempt count: an earlier attempt may have ended before.
    attempt_begin = max((index for index, kind in enumerate(kinds) if kind in ("run_started", "submitted")), default=0)
    if "run_ended" not in kinds[attempt_begin:]:
        lines = (ray_job.get("message") or "").strip().splitlines()
        reason = f"its driver is gone: {lines[-1] if lines else ray_job['status']}"
        run_name = shlex.quote(record.called or str(run))
        next_commands = list[str]()
        with suppress(RunDirError):  # a damaged config: nothing resumes the run
            kind = RunDir(run).recorded_config()["kind"]
            next_commands.append(f"rlctl train {kind} --resume {run_name} --cluster {record.cluster}")
        EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=reason, next=next_commands)
