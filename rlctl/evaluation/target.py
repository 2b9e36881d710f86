"""Search for the weights to evaluate or to export: of a run, a checkpoint, a Hugging Face folder, or the hub."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rlctl.config.builtin import recipe_names
from rlctl.config.errors import UserError
from rlctl.config.run_weights import is_adapter, is_checkpoint, is_model
from rlctl.models.facts import has_weights
from rlctl.models.weight_headers import explain_no_weights
from rlctl.run.checkpoints import Checkpoint, Checkpoints, damage_of_weights, hold
from rlctl.run.file_manifest import MANIFEST
from rlctl.run.run_dir import RunDir, RunDirError, find_run, model_name

_END_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class TargetError(UserError):
    """A text that names no weights. The error's text is one line for the user."""


@dataclass(frozen=True)
class Target:
    """Weights in a Hugging Face folder, and their origin."""

    # The folder, or a hub name.
    model: str
    # Number of training steps of the weights; 0 if it is not known. Seeds of validation are derived from it.
    step: int = 0
    # Directory of the weights' run; None if it is not known.
    run: Path | None = None

    @property
    def name(self) -> str:
        """Name for messages: the run's name and the step, or the model's name."""
        return f"{self.run.resolve().name} step {self.step}" if self.run else model_name(self.model)


def find_target(text: str, root: Path, step: int | None = None) -> Target:
    """Return the weights that `text` names: a Hugging Face folder, a checkpoint or a run.

    text: a path, or a name within the folder of runs `root`. A text of the form owner/name that is not on this machine
    is taken for a hub name. step: step of a run's checkpoint; None means the newest. Raises TargetError.
    """
    path = next((path for path in (Path(text), root / text) if is_model(path) or is_checkpoint(path)), None)
    if path is not None:
        if not (is_checkpoint(path) or is_adapter(path) or has_weights(path)):
            problem = f"{path} has a config.json, but no weights: {explain_no_weights(path)}"
            raise TargetError(f"{problem}; a run with model.path={path} model.random_init=true makes random ones")
        if step is not None:
            raise TargetError(f"--step {step}: {text} is one set of weights; --step chooses a checkpoint of a run")
        if is_checkpoint(path):
            return _target_of_checkpoint(path)
        is_export = path.name == "hf" and is_checkpoint(path.parent)
        return _target_of_checkpoint(path.parent) if is_export else Target(str(path))
    try:
        run = find_run(text, root)
    except RunDirError as error:
        if _HUB_NAME.fullmatch(text) and not Path(text).exists():
            return Target(text)
        if text in recipe_names():
            raise TargetError(f"{text}: a recipe, which has no weights; name a run, a checkpoint or a model") from None
        # The error's text has the names of similar runs after "; ".
        hint = str(error).partition("; ")[2] or "`rlctl runs list` shows the runs"
        problem = "no run, no checkpoint, and no folder with config.json and weights"
        raise TargetError(f"{text}: {problem}; {hint}") from None
    return _target_of_run(run, step)


def digest_of_weights(folder: Path) -> str:
    """Return a digest of a model's files.

    In a checkpoint it is computed from the manifest, else from the files' sizes, times, first and last bytes.
    """
    digest = hashlib.sha256()
    if folder.name == "hf" and (folder.parent / MANIFEST).is_file():
        digest.update(json.dumps(_recorded_digests(folder.parent), sort_keys=True).encode())
        return digest.hexdigest()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        facts = path.stat()
        digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            file.seek(max(0, facts.st_size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def _target_of_run(run: Path, step: int | None) -> Target:
    """Return the weights of a run's checkpoint at `step`, or of the newest. Raises TargetError, also for damage."""
    checkpoints = Checkpoints(RunDir(run).checkpoints, 1, 0)
    by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints.all()}
    if step is not None:
        if step not in by_step or not hold(by_step[step].path):
            listed = ", ".join(map(str, by_step)) or "none"
            raise TargetError(f"{run} has no checkpoint of step {step}; there are {listed}")
        return _checked_target(by_step[step], run)
    checked = checkpoints.damage_of_newest()
    if checked is None:
        raise TargetError(f"{run} has no checkpoint yet")
    newest, damage = checked
    if damage:
        # A run that still trains may have deleted this checkpoint meanwhile, and saved another. Then search again.
        if checkpoints.damage_of_newest() != checked:
            return _target_of_run(run, step)
    elif newest not in by_step or not hold(by_step[newest].path):
        # The run saved the newest checkpoint after `by_step` was read, or has deleted it since. Search again.
        return _target_of_run(run, step)
    earlier = [by_step[number] for number in by_step if number < newest]
    exported = [checkpoint for checkpoint in earlier if is_model(checkpoint.export)]
    try:
        if damage:
            raise TargetError(damage)
        return _checked_target(by_step[newest], run)
    except TargetError as error:
        if not exported:
            raise
        # Add an earlier checkpoint with weights to the message.
        previous = exported[-1]
        raise TargetError(f"{error}; the one before: --step {previous.step}, or {previous.path}") from None


def _target_of_checkpoint(path: Path) -> Target:
    """Return the weights of the checkpoint in folder `path`. Raises TargetError."""
    by_path = {checkpoint.path: checkpoint for checkpoint in Checkpoints(path.parent, 1, 0).all()}
    if path not in by_path or not hold(path):
        raise TargetError(f"{path}: no checkpoint of rlctl, or its state.json cannot be read")
    # A checkpoint is RUN/checkpoints/step_N.
    return _checked_target(by_path[path], run=path.absolute().parents[1])


def _checked_target(checkpoint: Checkpoint, run: Path) -> Target:
    """Return a checkpoint's weights after a check of their files. Raises TargetError for damage."""
    folder = checkpoint.export
    if damage := damage_of_weights(folder):
        raise TargetError(damage)
    if not is_model(folder):
        raise TargetError(f"{checkpoint.path} has no hf/ folder: its run had checkpoint.export=false")
    return Target(str(folder), checkpoint.step, run if (run / "config.yaml").is_file() else None)


def _recorded_digests(checkpoint: Path) -> dict[str, str]:
    """Return the digest of each file of hf/ in the checkpoint's manifest."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return {name: str(facts["digest"]) for name, facts in files.items() if name.startswith("hf/")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise TargetError(f"{checkpoint / MANIFEST}: missing or not readable") from None
