"""Resume of a run: finding the run, checking its config against its newest checkpoint, and showing what is left."""

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
from rlctl.run.fingerprint import contradictions, made_with, setting_text
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError, find_run


@dataclass(frozen=True)
class Resumed:
    """Run to be resumed."""

    # The run's directory.
    run: Path
    # Name or path that the user typed.
    typed: Path
    overrides: list[str]

    def command(self, kind: str, where: str) -> str:
        """Return the command that resumes the run, to be shown after a dry run. where: options that name a cluster."""
        return shlex.join(["rlctl", "train", kind, "--resume", str(self.typed), *self.overrides]) + where


def find_resumed(text: Path, overrides: list[str]) -> Resumed:
    """Find a run by its name or directory. Raises ConfigError if there is none, or if it has no config.yaml."""
    try:
        run = find_run(str(text), runs_folder(overrides))
    except RunDirError as error:
        raise ConfigError([Problem(f"--resume {text}", "", str(error).removeprefix(f"{text}: "))]) from None
    if not (run / "config.yaml").is_file():
        raise ConfigError([Problem(f"--resume {text}", "", f"{run} has no config.yaml; see `rlctl runs list`")])
    return Resumed(run, text, overrides)


def replace_lost_model(resumed: Resumed) -> list[str]:
    """Return the override of `model.path` that replaces a lost model folder by a checkpoint, see `stand_in`.

    The list is empty if the folder exists.
    """
    try:
        model = str(RunDir(resumed.run).recorded_config()["model"].get("path"))
    except (RunDirError, KeyError):
        # The error is left to `load`, which has a better message.
        return []
    folder = stand_in(model, _checkpoints(resumed.run).latest_as_written())
    return [f"model.path={folder}"] if folder else []


def refuse_contradictions(composed: Composed[Settled], run: Path) -> None:
    """Raise ConfigError with every value that contradicts the run's newest checkpoint.

    A checkpoint on another machine, or with a damaged state file, is not compared.
    """
    checkpoints = _checkpoints(run)
    with locate_errors(f"--resume {run}", EarlierVersion):
        checkpoints.refuse_earlier()
    newest = checkpoints.latest_as_written()
    if newest is None:
        return
    contradicted = list(_contradictions(composed.settled, newest))
    if contradicted:
        raise ConfigError(Problem(str(composed.origins.get(key, "")), key, reason) for key, reason in contradicted)


def plan_of_resume(composed: Composed[Settled], run: Path) -> list[tuple[str, str]]:
    """Return table rows about a resume: its checkpoint, the remaining steps, the changed keys.

    Raises ConfigError if all checkpoints are damaged.
    """
    record = JobRecord.read(run)
    changes = list(_changes(composed, run)) or ["nothing"]
    change_rows = [("changes" if not index else "", line) for index, line in enumerate(changes)]
    if record and record.remote:
        return [("goes on after", f"the newest whole checkpoint in {record.remote} on {record.cluster}"), *change_rows]
    with locate_errors(f"--resume {run}", NoWholeCheckpoint):
        newest = _checkpoints(run).newest_whole()
    checkpoint = newest.checkpoint
    done = checkpoint.step if checkpoint else 0
    steps = composed.config.num_steps
    rows = [("damaged", line) for line in newest.damaged.values()] + [("note", line) for line in newest.notes]
    start = f"step {done}: {checkpoint.path}" if checkpoint else "the start: it has no checkpoint"
    rows.append(("goes on after", start))
    num_left = max(0, steps - done)
    rows.append(("left", f"{num_left} of {steps} steps" + (f": {done + 1} to {steps}" if num_left else "")))
    return [*rows, *change_rows]


def _checkpoints(run: Path) -> Checkpoints:
    # The values of keep_last and keep_best do not matter here: nothing is saved or deleted.
    return Checkpoints(RunDir(run).checkpoints, keep_last=1, keep_best=0)


def _contradictions(settled: Settled, newest: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value of a config that the checkpoint `newest` contradicts."""
    config = settled.config
    file = config_file(config.model.path)
    then = newest.state.get("made_with")
    if then:
        now = made_with(settled, file.parent if file else None)
        for contradiction in contradictions(then, now, newest.step):
            yield contradiction.key, str(contradiction)
    if config.num_steps < newest.step:
        yield f"{config.kind}.num_steps", f"must be at least {newest.step}, the step of the newest checkpoint"


def _changes(composed: Composed[Settled], run: Path) -> Iterator[str]:
    """Yield `key: old -> new` for every value that differs from the run's config.yaml."""
    root, _ = draft(None, str(run / "config.yaml"), [])
    old = {key: node.value for key, node in leaves(root)}
    new = dict(_flat(composed.values(), ""))
    for key in old | new:
        before = old.get(key, "not set")
        after = new.get(key, "not set")
        if before != after and key in composed.secrets:
            yield f"{key}: another value of {composed.secrets[key]}"
        elif before != after:
            yield f"{key}: {setting_text(before)} -> {setting_text(after)}"


def _flat(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf below a config node."""
    children: list[tuple[Any, Any]] = []
    if isinstance(node, dict):
        children += node.items()
    elif isinstance(node, list):
        children += enumerate(node)
    if not children:
        yield key, node
    for name, child in children:
        yield from _flat(child, f"{key}.{name}" if key else str(name))
