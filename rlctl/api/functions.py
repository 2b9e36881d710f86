"""The functions of `import rlctl`: rlctl's commands, called from Python.

They take the commands' recipes and overrides, and raise the same problems. A run or an evaluation runs in a separate
process, so that it does not change signals, environment variables and Ray of the caller's process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

from rlctl.api.objects import OBJECTS, Overrides, texts_of
from rlctl.api.process import Call
from rlctl.api.run_records import RecordedRun, metrics_of
from rlctl.config.builtin import find_recipe, runs_folder
from rlctl.config.compose import compose
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.provenance import plain
from rlctl.preflight.installation import missing_problem
from rlctl.run.run_dir import RunDir, find_run
from rlctl.telemetry.jsonl import Tail, is_sound

# Called with the metrics of a step or a validation, by name.
OnStep = Callable[[Mapping[str, float]], object]
# Called with a line of output.
Log = Callable[[str], object]
# Exit codes of a command.
_BAD_INPUT = 2
_INTERRUPTED = 130


class RunFailed(RuntimeError):
    """A run or an evaluation that failed although its input was right. The message is the reason."""

    def __init__(self, reason: str, run: RecordedRun | None = None) -> None:
        super().__init__(reason)
        # None for an evaluation, and for a run that failed before it had a directory.
        self.run = run


class Interrupted(KeyboardInterrupt):
    """A run that was stopped by Ctrl-C, by `rlctl runs stop`, or by a signal. It is saved and can be resumed."""

    def __init__(self, reason: str, run: RecordedRun | None = None) -> None:
        super().__init__(reason)
        # None for an evaluation, and for a run that was stopped before it had a directory.
        self.run = run


@dataclass(frozen=True)
class CheckedConfig:
    """A config without problems."""

    # "grpo" or "sft".
    kind: str
    # All values, defaults included.
    config: dict[str, Any]
    # Remarks for the user. They stop no run.
    notes: list[str]


def check(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    try_rewards: bool = False,
    try_environments: bool = False,
) -> CheckedConfig:
    """Check a config as `rlctl config check` does, and start nothing.

    recipe: the name of a shipped recipe, a file, or a run. overrides: see `train`. try_rewards: call each reward on
    the first row, in a separate process. try_environments: begin an episode with the first row, also there.

    Raises ConfigError with all problems, in its attribute `problems`.
    """
    from rlctl.launch.prepare import RunRequest, prepare

    with TemporaryDirectory(prefix="rlctl-objects-") as folder:
        texts = texts_of(overrides, lambda: Path(folder))
        try:
            prepared = prepare(RunRequest(kind=None, recipe=str(recipe), overrides=texts), "checked")
            prepared.try_first_rows()
            prepared.try_users_code(rewards=try_rewards, environments=try_environments)
        except ModuleNotFoundError as error:
            if problem := missing_problem(error):
                raise ConfigError([problem]) from error
            raise
        composed = prepared.composed
        return CheckedConfig(composed.config.kind, composed.written(), prepared.notes)


def train(
    recipe: str | Path | None = None,
    overrides: Overrides = (),
    *,
    resume: str | Path | RecordedRun | None = None,
    log: Log | None = print,
    on_step: OnStep | None = None,
) -> RecordedRun:
    """Train as `rlctl train` does on this machine, and return the run when it is done.

    recipe: the name of a shipped recipe or a file; None only with `resume`. overrides: texts such as
    "grpo.num_steps=20", or values by dotted key, such as {"grpo.num_steps": 20}. In a mapping a value may be a function
    or a class where a recipe would name it by `file.py:object`: rewards, environment, agent, loss, advantage. The
    processes of the run load it as if from a file. resume: a run to continue, by name, directory or record. log: called
    with each line that `rlctl train` prints; with None the lines are only in the run's directory. on_step: called with
    the metrics of each step and each validation in order, by name (`step` included).

    After Ctrl-C, or an interrupted notebook cell, the run finishes its step and saves; a second Ctrl-C stops it at
    once. An error of `log` or `on_step` stops the run after its step too, and is then raised.

    Raises ConfigError with all problems before anything starts, RunDirError for a `resume` that names no run,
    RunFailed, and Interrupted.
    """
    if (recipe is None) == (resume is None):
        raise ConfigError([Problem("recipe", "", "name a recipe, or a run to resume: one of both")])
    resumed = None
    if resume is not None:
        resumed = resume.path if isinstance(resume, RecordedRun) else find_run(str(resume), runs_folder())
    texts = texts_of(overrides, lambda: _objects_folder(recipe, overrides, resumed))
    call = Call(
        "train",
        log,
        recipe=None if recipe is None else str(recipe),
        overrides=texts,
        resume=None if resumed is None else str(resumed),
    )
    code = call.run_to_end(_StepReader(call, on_step).look)
    _raise_end(call, code)
    assert call.run
    return RecordedRun(call.run)


def evaluate(
    target: str | Path | RecordedRun,
    recipe: str | Path | None = None,
    overrides: Overrides = (),
    *,
    data: Sequence[str | Path] = (),
    samples: int | None = None,
    step: int | None = None,
    to: str | Path | None = None,
    save_every: int = 256,
    log: Log | None = print,
) -> list[dict[str, Any]]:
    """Evaluate weights on held-out tasks as `rlctl eval` does, and return the result of each data set.

    target: a run (its newest checkpoint), a checkpoint, a Hugging Face folder, or a hub name. recipe: a recipe with the
    data and rewards to use; None means those of the weights' run. data: files of rows to use instead. samples: number
    of answers to each task. step: use the run's checkpoint of this step. to: folder for results. save_every: number of
    tasks after which answers are saved; after an interruption the same call continues from the saved answers.
    overrides, log: see `train`. A result has the fields that `rlctl eval --json` prints.

    Raises ConfigError, RunFailed, and Interrupted.
    """
    text = str(target.path) if isinstance(target, RecordedRun) else str(target)
    call = Call(
        "evaluate",
        log,
        target=text,
        recipe=None if recipe is None else str(recipe),
        overrides=texts_of(overrides, lambda: _objects_folder(recipe, overrides)),
        data=[str(path) for path in data],
        samples=samples,
        step=step,
        to=None if to is None else str(to),
        save_every=save_every,
    )
    _raise_end(call, call.run_to_end(lambda: None))
    return call.results


def load_run(run: str | Path) -> RecordedRun:
    """Return the records of a run. run: its directory, or its name in the default `run.dir`.

    Raises RunDirError, a ValueError, for a text that names no run.
    """
    return RecordedRun(find_run(str(run), runs_folder()))


def _objects_folder(recipe: str | Path | None, overrides: Overrides, resumed: Path | None = None) -> Path:
    """Return the folder for the objects that a call passes to its run, such as reward functions, pickled.

    The folder is in `run.dir`, beside the runs. resumed: directory of the run to continue; None: a new run.
    """
    if resumed is not None:
        return resumed.parent / OBJECTS
    folder = overrides.get("run.dir") if isinstance(overrides, Mapping) else None
    if folder is None and recipe is not None:
        folder = plain(compose(find_recipe(str(recipe)), []))["run"]["dir"]
    return Path(folder or runs_folder()) / OBJECTS


def _raise_end(call: Call, code: int) -> None:
    """Raise the error of a call that failed or was interrupted. code: exit code of its process."""
    if code == 0 and not call.is_interrupted:
        return
    run = RecordedRun(call.run) if call.run else None
    reason = call.failure or (run.reason if run else "")
    if not reason and code < 0:
        reason = f"its process was ended by {Signals(-code).name}"
    elif not reason and code == 0:
        # Ctrl-C came after the last step: the run is done, and the caller still gets Interrupted.
        reason = "Ctrl-C, as it was done"
    reason = reason or call.last_line or f"its process ended with exit code {code}"
    if code == _INTERRUPTED or call.is_interrupted:
        raise Interrupted(reason, run)
    if code == _BAD_INPUT:
        raise ConfigError(call.problems or [Problem("", "", reason)])
    raise RunFailed(reason, run)


class _StepReader:
    """Reader of the metrics that a call's run records. It passes them to `on_step`."""

    def __init__(self, call: Call, on_step: OnStep | None) -> None:
        self._call = call
        self._on_step = on_step
        self._tail: Tail | None = None
        # Earlier records are not passed on: a resumed run has records of its earlier attempts.
        self._begin = time.time()
        # Time of the last record that was passed on. After a restart of the run the file is read again from its
        # beginning.
        self._last_time = 0.0

    def look(self) -> None:
        """Call `on_step` for each new record."""
        if self._on_step is None or self._call.run is None:
            return
        if self._tail is None:
            self._tail = Tail(RunDir(self._call.run).metrics)
        for record in self._tail.read():
            is_new = is_sound(record, ("step", "time")) and record["time"] > max(self._begin, self._last_time)
            if is_new and record.get("kind") in ("step", "validation"):
                self._last_time = record["time"]
                self._on_step(metrics_of(record))
