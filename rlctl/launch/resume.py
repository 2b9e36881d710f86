"""A run that is to go on: found, checked against its newest checkpoint, and its remaining steps."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.builtin import runs_folder
from rlctl.config.errors import ConfigError, Problem, locate_errors
from rlctl.config.provenance import leaves
from rlctl.models.model_sizes import config_file
from rlctl.preflight.load import Composed, draft
from rlctl.preflight.settled import Settled
from rlctl.run.checkpoints import Checkpoint, Checkpoints, EarlierVersion, NoWholeCheckpoint, stand_in
from rlctl.run.fingerprint import contradictions, made_with
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError, find_run


@dataclass(frozen=True)
class Resumed:
    """A run that is to go on."""

    # The run's directory.
    run: Path
    # The name or path that was typed.
    asked: Path
    overrides: list[str]

    def command(self, kind: str, where: str) -> str:
        """Return the command of the run that a dry run showed. where: the options of a cluster."""
        return shlex.join(["rlctl", "train", kind, "--resume", str(self.asked), *self.overrides]) + where


def find_resumed(text: Path, overrides: list[str]) -> Resumed:
    """Find a run by its name or directory. Raises ConfigError if it holds no config to go on with."""
    try:
        run = find_run(str(text), runs_folder(overrides))
    except RunDirError as error:
        raise ConfigError([Problem(f"--resume {text}", "", str(error).removeprefix(f"{text}: "))]) from None
    if not (run / "config.yaml").is_file():
        raise ConfigError([Problem(f"--resume {text}", "", f"{run} has no config.yaml; see `rlctl runs list`")])
    return Resumed(run, text, overrides)


def replace_lost_model(resumed: Resumed) -> list[str]:
    """Return the override by which a run goes on without the folder of its model, see `stand_in`; often none."""
    try:
        model = str(RunDir(resumed.run).recorded_config()["model"].get("path"))
    except (RunDirError, KeyError):
        # The load of the config says more.
        return []
    found = stand_in(model, _checkpoints(resumed.run).latest_as_written())
    return [f"model.path={found}"] if found else []


def refuse_contradictions(composed: Composed[Settled], run: Path) -> None:
    """Raise ConfigError with every value that the run's newest checkpoint contradicts, if its files are here.

    A state that is not as it was written contradicts nothing.
    """
    checkpoints = _checkpoints(run)
    with locate_errors(f"--resume {run}", EarlierVersion):
        checkpoints.refuse_earlier()
    newest = checkpoints.latest_as_written()
    if newest is None:
        return
    wrong = list(_contradictions(composed.settled, newest))
    if wrong:
        raise ConfigError(Problem(str(composed.origins.get(key, "")), key, what) for key, what in wrong)


def plan_of_resume(composed: Composed[Settled], run: Path) -> list[tuple[str, str]]:
    """Return rows on a resume: its checkpoint, the steps that are left, the changed keys.

    Raises ConfigError if no checkpoint is whole.
    """
    record, changes = JobRecord.read(run), list(_changes(composed, run)) or ["nothing"]
    changed = [("changes" if not index else "", line) for index, line in enumerate(changes)]
    if record and record.remote:
        return [("goes on after", f"the newest whole checkpoint in {record.remote} on {record.cluster}"), *changed]
    with locate_errors(f"--resume {run}", NoWholeCheckpoint):
        found = _checkpoints(run).newest_whole()
    done, steps = found.checkpoint.step if found.checkpoint else 0, composed.config.num_steps
    rows = [("damaged", line) for line in found.damaged.values()] + [("note", line) for line in found.notes]
    where = f"step {done}: {found.checkpoint.path}" if found.checkpoint else "the start: it has no checkpoint"
    rows.append(("goes on after", where))
    left = max(0, steps - done)
    rows.append(("left", f"{left} of {steps} steps" + (f": {done + 1} to {steps}" if left else "")))
    return [*rows, *changed]


def _checkpoints(run: Path) -> Checkpoints:
    # keep_last and keep_best matter to a run that saves alone.
    return Checkpoints(RunDir(run).checkpoints, 1, 0)


def _contradictions(settled: Settled, newest: Checkpoint) -> Iterator[tuple[str, str]]:
    config = settled.config
    file = config_file(config.model.path)
    then = newest.state.get("made_with")
    if then:
        for each in contradictions(then, made_with(settled, file.parent if file else None), newest.step):
            yield each.key, str(each)
    if config.num_steps < newest.step:
        yield f"{config.kind}.num_steps", f"must be at least {newest.step}, the step of the newest checkpoint"


def _changes(composed: Composed[Settled], run: Path) -> Iterator[str]:
    """Yield `key: old -> new` for every value that is not the run's own."""
    root, _ = draft(None, str(run / "config.yaml"), [])
    old = {key: node.value for key, node in leaves(root)}
    new = dict(_flat(composed.values(), ""))
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, "not set"), new.get(key, "not set")
        if before != after and key in composed.secrets:
            yield f"{key}: another value of {composed.secrets[key]}"
        elif before != after:
            yield f"{key}: {_shown(before)} -> {_shown(after)}"


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = list(children)
    if not found:
        yield key, value
    for name, child in found:
        yield from _flat(child, f"{key}.{name}" if key else str(name))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
