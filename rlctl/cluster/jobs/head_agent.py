"""What rlctl does on a cluster's head for a run: take it in as a Ray job, say how it is, stop it.

Reached through `fleet/remote_scripts/job.py`. Secrets come in a request, rest in a file that only its owner reads, and
are gone from there once the driver has them: Ray shows a job's environment to everybody who may see the job.
"""

import base64
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from secrets import token_hex
from typing import Any

from rlctl.run.run_dir import JobRecord

_HTTP_S = 20.0
SECRETS = "job.env"
# The config that the job is to drive. It becomes the run's own once the run goes on with it.
CONFIG = "job.yaml"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def accept(request: dict[str, Any]) -> dict[str, Any]:
    """Submit a run. The reply: run (its directory), job; or problems, a line each, and nothing was started.

    request: cluster, config (YAML), resume (a run directory or null), work, files (a zip in base64, or null),
    storage (where relative run directories stand; null: in `work`), called (the folder of runs where it is submitted,
    or null), secrets, flags (of rlctl.cli.job); those of `_http`.
    """
    from rlctl.run.run_dir import RunDir, RunDirError
    from rlctl.telemetry.events import EventLog

    work = Path(request["work"]).expanduser()
    if request["files"] is not None:
        _unpack(request["files"], work)
    try:
        if request["files"] is not None and (problems := _problems(request["config"], work, request["secrets"])):
            return _refused(request, work, problems)
        os.chdir(work)
        run, fresh = _run_dir(request)
        claim = RunDir(run).claim()
    except RunDirError as error:
        return _refused(request, work, [str(error)])
    try:
        return _handed_over(request, run, work, fresh)
    except BaseException as error:
        (run / SECRETS).unlink(missing_ok=True)
        if fresh:
            shutil.rmtree(run, ignore_errors=True)
        else:
            EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=f"not submitted: {error}", next=[])
        _refused(request, work, [])
        raise
    finally:
        # The driver's from here on.
        os.close(claim)


def _handed_over(request: dict[str, Any], run: Path, work: Path, fresh: bool) -> dict[str, Any]:
    from rlctl.telemetry.events import EventLog
    from rlctl.utils.files import write_whole

    attempt = _attempts(run) + 1
    job = f"{run.name}-{attempt}-{token_hex(3)}"
    write_whole(run / CONFIG, request["config"])
    if fresh:
        write_whole(run / "config.yaml", request["config"])
    _write_secrets(run / SECRETS, request["secrets"])
    called = f"{request['called']}/{run.name}" if request["called"] else None
    JobRecord(request["cluster"], job, str(work), attempt, called=called).write(run)
    EventLog(run / "events.jsonl").emit("submitted", job=job, cluster=request["cluster"])
    _submit(request, job, run)
    return {"run": str(run), "job": job, "attempt": attempt}


def _refused(request: dict[str, Any], work: Path, problems: list[str]) -> dict[str, Any]:
    """Nothing stays of what came along."""
    if request["files"] is not None:
        os.chdir("/")
        shutil.rmtree(work, ignore_errors=True)
    return {"problems": problems}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """How the job is, in Ray's words. A run whose driver is gone without a word is marked as ended."""
    try:
        found = _http(request, f"/api/jobs/{request['job']}")
    except FileNotFoundError:
        found = {"status": "FAILED", "message": "its cluster was started anew"}
    if found["status"] in _ENDED:
        _mark_ended(Path(request["run"]), request["job"], found)
    return {"status": found["status"], "message": (found.get("message") or "").strip()}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Ask a job to end: its driver finishes the step and saves, then goes; with `now`, at once. The reply: stopped,
    whether it ran."""
    if request["now"] and (driver := _driver(Path(request["run"]))):
        driver.kill()
    return {"stopped": bool(_http(request, f"/api/jobs/{request['job']}/stop", method="POST")["stopped"])}


def _driver(run: Path) -> Any:
    """The process that drives a run on this machine; None if there is none."""
    import psutil

    from rlctl.dashboard.state import read_state
    from rlctl.utils.process import lives

    start = read_state(run).start
    here = start.get("host") == socket.gethostname() and lives(start["pid"], start["create_time"], None)
    return psutil.Process(start["pid"]) if here else None


def runs(request: dict[str, Any]) -> dict[str, Any]:
    """The runs that work on the cluster now: path, job, devices (that train, and that generate), and what
    `rlctl runs list` knows of each."""
    found = []
    for job in _http(request, "/api/jobs/"):
        path = (job.get("metadata") or {}).get("rlctl_run")
        if path is None or job["status"] in _ENDED:
            continue
        known = _known(Path(path))
        # Its driver may take a moment to go after the last word.
        if known.get("status") in ("new", "running", "died"):
            found.append({"path": path, "job": job["submission_id"], **known})
    return {"runs": found}


def _known(run: Path) -> dict[str, Any]:
    from rlctl.dashboard.run_list import entry
    from rlctl.dashboard.state import read_state

    state = read_state(run)
    return {**vars(entry(run, state)), "devices": state.start.get("devices", {})}


def _run_dir(request: dict[str, Any]) -> tuple[Path, bool]:
    """The run's directory, and whether it was made now; its place and name are put into the config.

    Raises RunDirError.
    """
    import yaml

    from rlctl.run.run_dir import RunDir, automatic_name

    config = yaml.safe_load(request["config"])
    if request["resume"] is not None:
        run = RunDir.open(Path(request["resume"])).path.resolve()
        _refuse_if_driven(request, run)
        return run, False
    root = Path(request["storage"] or ".").expanduser().resolve() / config["run"]["dir"]
    name = config["run"]["name"] or automatic_name(config["kind"], config["model"]["path"], root)
    config["run"] |= {"dir": str(root), "name": name}
    request["config"] = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return RunDir.create(name, root).path, True


def _refuse_if_driven(request: dict[str, Any], run: Path) -> None:
    from rlctl.dashboard.state import read_state
    from rlctl.run.run_dir import RunDirError

    record = JobRecord.read(run)
    if record is None:
        return
    if record.cluster != request["cluster"]:
        if read_state(run).status in ("new", "running"):
            raise RunDirError(f"{run} is a run of {record.cluster}: stop it there first, with `rlctl runs stop`")
        return
    try:
        driven = _http(request, f"/api/jobs/{record.job}")["status"] not in _ENDED
    except FileNotFoundError:
        return
    if driven:
        raise RunDirError(f"{run} is still running (job {record.job}): watch it with `rlctl runs dash`")


def _submit(request: dict[str, Any], job: str, run: Path) -> None:
    command = [sys.executable, "-m", "rlctl.cli.job", str(run), *request["flags"]]
    told = {"submission_id": job, "entrypoint": shlex.join(command), "metadata": {"rlctl_run": str(run)}}
    try:
        _http(request, "/api/jobs/", told, method="POST")
    except OSError as error:
        # A head that is busy may take a job and say so too late.
        try:
            _http(request, f"/api/jobs/{job}")
        except OSError:
            raise error from None


def _http(request: dict[str, Any], path: str, told: Any = None, method: str = "GET") -> Any:
    """Ray's job API (https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html), which
    listens on the head's loopback. Raises FileNotFoundError for a job that it does not know."""
    file = Path(request["token_path"])
    # In a pod Kubernetes gives it.
    token = file.read_text(encoding="utf-8").strip() if file.is_file() else os.environ["RAY_AUTH_TOKEN"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{request['dashboard']}{path}",
        data=None if told is None else json.dumps(told).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method=method,
    )
    try:
        # No proxy stands between a host and itself.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=_HTTP_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise FileNotFoundError(path) from None
        said = error.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"Ray's job API says {error.code}: {said[-1] if said else error.reason}") from None


def _unpack(files: str, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(files))) as packed:
        packed.extractall(work)


def _problems(config: str, work: Path, secrets: dict[str, str]) -> list[str]:
    """What `rlctl config check` has to say of a config in the files that came with it, and with the run's secrets."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config)
        file.flush()
        command = [sys.executable, "-m", "rlctl.cli.main", "config", "check", file.name]
        done = subprocess.run(
            command, cwd=work, env={**os.environ, **secrets}, capture_output=True, text=True, check=False
        )
        lines = [line.replace(f"{file.name}:", "line ") for line in done.stderr.splitlines() if line.strip()]
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found or ([] if done.returncode == 0 else lines[-1:])


def _write_secrets(path: Path, secrets: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    if secrets:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(secrets, file)


def _attempts(run: Path) -> int:
    from rlctl.run.run_dir import RunDir

    record = JobRecord.read(run)
    return max(record.attempt if record else 0, RunDir(run).attempt)


def _kind(run: Path) -> str:
    import yaml

    return str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["kind"])


def _mark_ended(run: Path, job: str, found: dict[str, Any]) -> None:
    """The end that a driver which was killed could not write. Another job may have the run by now."""
    from rlctl.telemetry.events import EventLog
    from rlctl.telemetry.jsonl import read_records

    record = JobRecord.read(run)
    if record is None or record.job != job:
        return
    (run / SECRETS).unlink(missing_ok=True)
    kinds = [event["kind"] for event in read_records(run / "events.jsonl")]
    started = max((n for n, kind in enumerate(kinds) if kind in ("run_started", "submitted")), default=-1)
    if "run_ended" not in kinds[max(0, started) :]:
        said = (found.get("message") or "").strip().splitlines()
        reason = f"its driver is gone: {said[-1] if said else found['status']}"
        known = record.called or str(run)
        again = [f"rlctl train {_kind(run)} --resume {shlex.quote(known)} --cluster {record.cluster}"]
        EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=reason, next=again)
