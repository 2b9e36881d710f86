"""Folder of one evaluation: first the answers in parts, then the result.

`NAME/{config.yaml, parts/FIRST-LAST/, rollouts.jsonl, result.json, manifest.json}`. NAME ends with a digest of all
settings and files that the answers depend on. So the same command finds the answers of a killed evaluation, and samples
only the missing ones. A part is written as a whole or not at all. Parts and result have manifests, and a file that does
not match its manifest is not used.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from rlctl.config.errors import UserError
from rlctl.config.plugins import model_rewards, served_judges
from rlctl.config.schema import GrpoConfig
from rlctl.dashboard.formats import count
from rlctl.data.tasks import Task
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.run.file_manifest import find_damage, write_manifest
from rlctl.telemetry.jsonl import Record
from rlctl.utils.files import sync, write_whole

# Sections of a config on which no answer depends.
_ASIDE = ("kind", "run", "trainer", "placement", "checkpoint", "health", "telemetry", "grpo", "async", "refit")
# Files of a finished evaluation, in the order in which they are written.
_FINISHED = ("rollouts.jsonl", "result.json")


# Remedy of a damaged result.
MADE_AGAIN = "the command that made the evaluation makes it again from its answers"


class EvaluationError(UserError):
    """An evaluation that cannot be started or read. The text is one line for the user."""


class DamagedResult(EvaluationError):
    """A result with a file that does not match its manifest. The text is one line with the file's name."""


def refuse_reward_models(config: GrpoConfig) -> None:
    """Raise EvaluationError if a reward is a model, for which an evaluation has no place."""
    for index in sorted([*model_rewards(config.rewards), *served_judges(config.rewards)]):
        remedy = "give other rewards, for example 'rewards=[{name: exact}]'"
        raise EvaluationError(f"rewards.{index}: an evaluation loads no reward model; {remedy}")


def digest_of(config: Mapping[str, Any], weights: str, rows: str) -> str:
    """Return 8 hexadecimal digits of a hash of everything on which answers and scores depend.

    config: values of the config. weights, rows: digests of the model's files and of the tasks.
    """
    values = {key: value for key, value in config.items() if key not in _ASIDE}
    values["data"] = {key: value for key, value in config["data"].items() if key not in ("train", "shuffle")}
    # The model's path may change; its weights have their own digest.
    values["model"] = config["model"]["max_length"]
    values["seed"] = config["run"]["seed"]
    values["dtype"] = config["trainer"]["dtype"]
    text = json.dumps([values, weights, rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def digest_of_rows(tasks: Sequence[Task]) -> str:
    """Return a digest of the tasks' rows. It does not depend on the model's tokenizer."""
    rows = [[task.id, task.answer, task.row] for task in tasks]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")).hexdigest()


class EvaluationFolder:
    """Answers and result of one data set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = path / "parts"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Create the folder, and lock it for the block. Raises EvaluationError if another process has locked it."""
        self._parts.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EvaluationError(f"{self.path} is being evaluated by another process") from None
            # Parts that a killed evaluation did not finish.
            for unfinished in self._parts.glob("tmp_*"):
                shutil.rmtree(unfinished)
            yield
        finally:
            os.close(descriptor)

    def save(self, places: range, groups: Sequence[RolloutGroup]) -> None:
        """Write the scored groups of the tasks with these indices as one part, all or none."""
        name = f"{places[0]:06d}-{places[-1]:06d}"
        temporary = self._parts / f"tmp_{name}"
        temporary.mkdir()
        save_groups(temporary, {place: group.rollouts for place, group in zip(places, groups)})
        write_manifest(temporary)
        for file in temporary.iterdir():
            sync(file)
        temporary.replace(self._parts / name)
        sync(self._parts)

    def places(self) -> set[int]:
        """Return the indices of the tasks whose groups are saved."""
        return set(chain.from_iterable(self._saved_ranges()))

    def drop_damaged(self) -> list[str]:
        """Remove each part that does not match its manifest; return a line on each. Call this within `claim`."""
        lines = []
        # A list, because the generator would read the folders while the loop removes them.
        for folder, places in zip(self._part_folders(), list(self._saved_ranges())):
            if damage := find_damage(folder):
                path, problem = next(iter(damage.items()))
                further = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
                lines.append(f"{path}: {problem}{further}; sampled again: {count(len(places), 'task')}")
                shutil.rmtree(folder)
        return lines

    def groups(self, tasks: Sequence[Task]) -> list[RolloutGroup]:
        """Return the saved group of each task. tasks: all tasks. Raises EvaluationError if a group is missing."""
        rollouts: dict[int, list[Rollout]] = {}
        for folder in self._part_folders():
            rollouts |= load_groups(folder)
        if lost := [task.id for place, task in enumerate(tasks) if place not in rollouts]:
            raise EvaluationError(f"{self._parts}: no answers to {len(lost)} of {len(tasks)} tasks, first {lost[0]}")
        return [RolloutGroup(tasks[place], rollouts[place]) for place in sorted(rollouts)]

    def missing(self, total: int, size: int) -> list[range]:
        """Return the indices below `total` without a saved group, as ranges of at most `size` indices."""
        saved = self.places()
        ranges: list[range] = []
        for place in range(total):
            if place in saved:
                continue
            if ranges and ranges[-1].stop == place and len(ranges[-1]) < size:
                ranges[-1] = range(ranges[-1].start, place + 1)
            else:
                ranges.append(range(place, place + 1))
        return ranges

    def finish(self, records: Sequence[Record], result: Mapping[str, Any]) -> None:
        """Write the answers as rollouts.jsonl, the result, and the manifest of both files."""
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        write_whole(self.path / "rollouts.jsonl", "".join(f"{line}\n" for line in lines))
        write_whole(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        write_manifest(self.path, _FINISHED)

    def result(self) -> dict[str, Any] | None:
        """Return the result; None if the evaluation is not finished.

        Raises DamagedResult for a file that does not match its manifest.
        """
        file = self.path / "result.json"
        if not file.is_file():
            return None
        for path, problem in find_damage(self.path).items():
            raise DamagedResult(f"{path}: {problem}")
        try:
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if not (result["by_task"] and result["rows"] and result["figures"]):
                raise KeyError
            return result
        except (OSError, ValueError, KeyError, TypeError):
            raise DamagedResult(f"{file}: not the result of an evaluation") from None

    def _part_folders(self) -> list[Path]:
        return sorted(path for path in self._parts.glob("*-*") if re.fullmatch(r"\d+-\d+", path.name))

    def _saved_ranges(self) -> Iterator[range]:
        for folder in self._part_folders():
            first, _, last = folder.name.partition("-")
            yield range(int(first), int(last) + 1)
