"""Measurements in separate processes: whole runs of `rlctl train` on the same work, and single functions."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from rlctl.bench.frame import Say
from rlctl.bench.workload import make_random_model, shape_folder
from rlctl.config.errors import ConfigError, Problem
from rlctl.telemetry.jsonl import Record, Tail, read_records

Result = TypeVar("Result")
# A run that is interrupted has this time to end.
_INTERRUPT_S = 60.0
# A child checks at this interval if its parent lives.
_LOOK_S = 1.0
# The records of a watched run are read at this interval.
_WATCH_S = 0.5
# Called with the new records of a run's metrics.jsonl.
Watch = Callable[[list[Record]], None]
# No validation, checkpoint or dashboard: a step's time would include them, or nobody would see them.
_BARE = (
    "data.validation.path=null",
    "validation.every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "telemetry.dashboard=off",
)


def run_all(
    kind: str, model: str, settings: Mapping[str, Sequence[str]], folder: Path, say: Say
) -> Iterator[tuple[str, list[Record]]]:
    """Run `rlctl train KIND` with each of the settings (name -> overrides); yield (name, step records) of each run.

    Each run is the tiny recipe on the same model with random weights, in the directory `run_folder(folder, name)`. All
    configs are checked before weights are made, because that takes minutes. Raises ConfigError with every problem of
    every run. Raises RuntimeError if weights cannot be made or a run fails; the text has the run's own reason.
    """
    shape = shape_folder(model, folder)
    say("checking what is asked for")
    weightless = (f"model.path={shape}", "model.random_init=true", "--dry-run")
    problems = []
    for name, overrides in settings.items():
        command = [*_command(kind, run_folder(folder, name), overrides), *weightless]
        dry_run = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
        # The user has not typed this command. So leave out the numbers of overrides and the notes on replaced values.
        lines = [line for line in dry_run.stderr.splitlines() if not line.startswith("note: ")]
        messages = [re.sub(r"^error: (override \d+: )?", "", line) for line in lines]
        if dry_run.returncode:
            problems += [Problem(name, "", text) for text in messages if not text.endswith("; nothing was started")]
    if problems:
        raise ConfigError(problems)
    say(f"random weights in the shape of {model}")
    make_random_model(shape, folder)
    for index, (name, overrides) in enumerate(settings.items()):
        say(f"{name}: run {index + 1} of {len(settings)}")
        run = run_folder(folder, name)
        records = train(name, _command(kind, run, overrides), run)
        yield name, [record for record in records if record["kind"] == "step"]


def train(name: str, command: Sequence[str], run: Path, watch: Watch | None = None) -> list[Record]:
    """Run the command line `command` of a run with the directory `run`; return the records of its metrics.jsonl.

    name: the run's name in messages. watch: called with new records while the run goes on. Raises RuntimeError with the
    run's own reason if the run fails. Ctrl-C stops the run before KeyboardInterrupt is raised.
    """
    output = run.parent / f"{run.name}.out"
    metrics = Tail(run / "metrics.jsonl")
    records = list[Record]()
    with output.open("w") as out:
        # In a new session the run does not get Ctrl-C from the terminal, but only once from `_stop`.
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            while True:
                # Without `watch` wait until the end, and read all records at once.
                code = _wait(process, _WATCH_S if watch else None)
                new_records = metrics.read()
                records += new_records
                if new_records and watch:
                    watch(new_records)
                if code is not None:
                    break
        except KeyboardInterrupt:
            _stop(process)
            raise
    if code:
        errors = [str(event["what"]) for event in read_records(run / "events.jsonl") if event["kind"] == "error"]
        reason = errors[-1] if errors else " / ".join(output.read_text().strip().splitlines()[-3:])
        raise RuntimeError(f"{name} ended with {code}: {reason}")
    return records


def train_command(kind: str, recipe: str, overrides: Sequence[str]) -> list[str]:
    """Return the command line of `rlctl train` with this Python interpreter."""
    return [sys.executable, "-m", "rlctl.cli.main", "train", kind, recipe, *overrides]


def run_folder(folder: Path, name: str) -> Path:
    """Return the directory of the run called `name`."""
    return folder / name.replace(", ", "-").replace(" ", "-")


def _command(kind: str, run: Path, settings: Sequence[str]) -> list[str]:
    """Return the command line of a run with the bench's data and model. settings: overrides, which win."""
    folder = run.parent
    overrides = [
        f"run.dir={folder}",
        f"run.name={run.name}",
        f"data.train.path={folder / 'train.jsonl'}",
        *_BARE,
        f"model.path={folder / 'model'}",
        "model.random_init=false",
    ]
    return train_command(kind, f"{kind}-tiny", [*overrides, *settings])


def _wait(process: "subprocess.Popen[bytes]", seconds: float | None) -> int | None:
    """Return the exit code of a process; None if it still runs after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a run by Ctrl-C, and kill it if it does not end."""
    # At the first signal the run ends after its step, at the second one at once.
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_INTERRUPT_S / 2)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()


def in_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call `work(*arguments)` in a separate process and return its value. The process then ends, which frees devices.

    It also ends with this process, and at Ctrl-C. Raises RuntimeError with the first line of an error of `work`.
    """
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except Exception as error:  # any error of `work`
            lines = str(error).strip().splitlines()
            raise RuntimeError(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}") from error
        except BaseException:
            # At Ctrl-C: leaving the block would wait until `work` ends.
            for child in active_children():
                child.kill()
            raise


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, for example killed: otherwise it would keep its device."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    Thread(target=watch, name="parent", daemon=True).start()
