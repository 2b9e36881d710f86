"""A whole run of `rlctl train` as one measurement of a bench, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.errors import ConfigError, Problem

_INTERRUPT_S = 60.0
# What would be timed beside the steps, or written for nobody.
_BARE = (
    "data.validation.path=null",
    "validation.every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "telemetry.dashboard=off",
)


def run_training(kind: str, name: str, settings: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Step records of `rlctl train KIND` from the tiny recipe with these settings.

    The run's directory is `run_folder(folder, name)`. Raises RuntimeError with the run's own words if it fails.
    """
    run = run_folder(folder, name)
    output = folder / f"{run.name}.out"
    with output.open("w") as out:
        # A session of its own: Ctrl-C reaches it once, from here.
        process = subprocess.Popen(_command(kind, run, settings), stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _stop(process)
            raise
    if code:
        raise RuntimeError(f"{name} ended with {code}: {_reason(run / 'events.jsonl', output)}")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def check_training(kind: str, settings: Mapping[str, Sequence[str]], shape: Path, folder: Path) -> None:
    """Raises ConfigError with what would keep `run_training` from starting: to be asked before weights are made, which
    takes minutes. settings: of each run, by its name. shape: the model's folder, without weights."""
    weightless = (f"model.path={shape}", "model.random_init=true", "--dry-run")
    problems = []
    for name, own in settings.items():
        command = [*_command(kind, run_folder(folder, name), own), *weightless]
        asked = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
        # Which of the command's overrides it was is nobody's but ours.
        said = [re.sub(r"^error: (override \d+: )?", "", line) for line in asked.stderr.splitlines()]
        said = [line for line in said if not line.endswith("; nothing was started")]
        if asked.returncode:
            problems += [Problem(name, "", line) for line in said]
    if problems:
        raise ConfigError(problems)


def _command(kind: str, run: Path, settings: Sequence[str]) -> list[str]:
    where = (f"run.dir={run.parent}", f"run.name={run.name}")
    return [sys.executable, "-m", "rlctl.cli.main", "train", kind, f"{kind}-tiny", *where, *_BARE, *settings]


def run_folder(folder: Path, name: str) -> Path:
    """Where the run of that name writes."""
    return folder / name.replace(", ", "-").replace(" ", "-")


def _reason(events: Path, output: Path) -> str:
    """Why a run failed, in its own words."""
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    errors = [str(event["what"]) for event in told if event["kind"] == "error"]
    return errors[-1] if errors else " / ".join(output.read_text().strip().splitlines()[-3:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_INTERRUPT_S / 2)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
