"""What rlctl does on a cluster's head for a run: take it in as a Ray job, say how it is, stop it.

Reached through `fleet/on_host/job.py`. Secrets come in a request, rest in a file that only its owner reads, and are
gone from there once the driver has them: Ray shows a job's environment to everybody who may see the job.
"""

import base64
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from rlctl.cluster.jobs.record import JobRecord

_HTTP_S = 20.0
SECRETS = "job.env"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def accept(request: dict[str, Any]) -> dict[str, Any]:
    """Submit a run. The reply: run (its directory), job; or problems, a line each, and nothing was started.

    request: cluster, config (YAML), resume (a run directory or null), work, files (a zip in base64, or null),
    storage (where relative run directories stand; null: in `work`), called (the folder of runs where it is submitted,
    or null), secrets, flags (of rlctl.cli.job); those of `_http`.
    """
    from rlctl.telemetry.events import EventLog
    from rlctl.telemetry.run_dir import RunDirError

    work = Path(request["work"]).expanduser()
    if request["files"] is not None:
        _unpack(request["files"], work)
        if problems := _problems(request["config"], work):
            shutil.rmtree(work, ignore_errors=True)
            return {"problems": problems}
    try:
        os.chdir(work)
        run, fresh = _run_dir(request)
    except RunDirError as error:
        return {"problems": [str(error)]}
    job = f"{run.name}-{_attempts(run) + 1}"
    try:
        _write_secrets(run / SECRETS, request["secrets"])
        called = f"{request['called']}/{run.name}" if request["called"] else None
        JobRecord(request["cluster"], job, str(work), called=called).write(run)
        EventLog(run / "events.jsonl").emit("submitted", job=job, cluster=request["cluster"])
        _submit(request, job, run)
    except BaseException as error:
        (run / SECRETS).unlink(missing_ok=True)
        if fresh:
            shutil.rmtree(run, ignore_errors=True)
        else:
            EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=f"not submitted: {error}", next=[])
        raise
    return {"run": str(run), "job": job}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """How the job is, in Ray's words. A run whose driver is gone without a word is marked as ended."""
    found = _http(request, f"/api/jobs/{request['job']}")
    if found["status"] in _ENDED:
        _mark_ended(Path(request["run"]), found)
    return {"status": found["status"], "message": (found.get("message") or "").strip()}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Ask a job to end: its driver finishes the step and saves, then goes. The reply: stopped, whether it ran."""
    return {"stopped": bool(_http(request, f"/api/jobs/{request['job']}/stop", method="POST")["stopped"])}


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
    from rlctl.telemetry.catalogue import entry
    from rlctl.telemetry.state import read_state

    return {**entry(run).as_dict(), "devices": read_state(run).start.get("devices", {})}


def _run_dir(request: dict[str, Any]) -> tuple[Path, bool]:
    """The run's directory with its config, and whether it was made now. Raises RunDirError."""
    import yaml

    from rlctl.telemetry.run_dir import RunDir, automatic_name

    config = yaml.safe_load(request["config"])
    if request["resume"] is not None:
        run = RunDir.open(Path(request["resume"])).path.resolve()
        _refuse_if_driven(request, run)
    else:
        root = Path(request["storage"] or ".").expanduser().resolve() / config["run"]["dir"]
        name = config["run"]["name"] or automatic_name(config["kind"], config["model"]["path"], root)
        config["run"] |= {"dir": str(root), "name": name}
        run = RunDir.create(name, root).path
    temporary = run / ".config.yaml.tmp"
    temporary.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(run / "config.yaml")
    return run, request["resume"] is None


def _refuse_if_driven(request: dict[str, Any], run: Path) -> None:
    from rlctl.telemetry.run_dir import RunDirError

    record = JobRecord.read(run)
    if record is None:
        return
    try:
        if _http(request, f"/api/jobs/{record.job}")["status"] not in _ENDED:
            raise RunDirError(f"{run} is still running (job {record.job}): watch it with `rlctl runs dash`")
    except FileNotFoundError:
        return


def _submit(request: dict[str, Any], job: str, run: Path) -> None:
    command = [sys.executable, "-m", "rlctl.cli.job", str(run), *request["flags"]]
    told = {"submission_id": job, "entrypoint": shlex.join(command), "metadata": {"rlctl_run": str(run)}}
    _http(request, "/api/jobs/", told, method="POST")


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


def _problems(config: str, work: Path) -> list[str]:
    """What `rlctl config check` has to say of a config in the files that came with it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config)
        file.flush()
        command = [sys.executable, "-m", "rlctl.cli.main", "config", "check", file.name]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        lines = [line.replace(f"{file.name}:", "line ") for line in done.stderr.splitlines() if line.strip()]
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found or ([] if done.returncode == 0 else lines[-1:])


def _write_secrets(path: Path, secrets: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    if secrets:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(secrets, file)


def _attempts(run: Path) -> int:
    from rlctl.telemetry.run_dir import RunDir

    record = JobRecord.read(run)
    last = int(record.job.rpartition("-")[2]) if record else 0
    return max(last, RunDir(run).attempt)


def _kind(run: Path) -> str:
    import yaml

    return str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["kind"])


def _mark_ended(run: Path, job: dict[str, Any]) -> None:
    """The end that a driver which was killed could not write."""
    from rlctl.telemetry.events import EventLog
    from rlctl.telemetry.jsonl import read_records

    kinds = [event["kind"] for event in read_records(run / "events.jsonl")]
    started = max((n for n, kind in enumerate(kinds) if kind in ("run_started", "submitted")), default=-1)
    if run.is_dir() and "run_ended" not in kinds[max(0, started) :]:
        said = (job.get("message") or "").strip().splitlines()
        reason = f"its driver is gone: {said[-1] if said else job['status']}"
        record = JobRecord.read(run)
        there = f" --cluster {record.cluster}" if record else ""
        known = record.called if record and record.called else str(run)
        again = [f"rlctl train {_kind(run)} --resume {shlex.quote(known)}{there}"]
        EventLog(run / "events.jsonl").emit("run_ended", status="failed", reason=reason, next=again)
