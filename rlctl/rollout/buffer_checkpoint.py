"""Scored groups that wait for their step, in a checkpoint: two files, columns of numbers and their scores."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.requests import FINISHES, RolloutId
from rlctl.preflight.version import earlier_version
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout
from rlctl.run.checkpoints import EarlierVersion

_ROLLOUTS, _SCORES = "groups.npz", "groups.json"


def save_groups(folder: Path, groups: Mapping[int, list[Rollout]]) -> None:
    """Write the rollouts of groups, by number, into `folder`."""
    rollouts = [rollout for each in groups.values() for rollout in each]
    np.savez(
        folder / _ROLLOUTS,
        groups=np.array(list(groups), np.int64),
        counts=np.array([len(each) for each in groups.values()], np.int64),
        lengths=np.array([len(rollout.tokens) for rollout in rollouts], np.int64),
        tokens=_joined([rollout.tokens for rollout in rollouts], np.int32),
        sampled=_joined([rollout.sampled for rollout in rollouts], np.bool_),
        log_probs=_joined([rollout.log_probs for rollout in rollouts], np.float32),
        versions=_joined([rollout.versions for rollout in rollouts], np.int32),
        finishes=np.array([FINISHES.index(rollout.finish) for rollout in rollouts], np.int8),
    )
    rows = [[asdict(rollout.id), asdict(rollout.score) if rollout.score else None] for rollout in rollouts]
    (folder / _SCORES).write_text(json.dumps(rows))


def load_groups(folder: Path) -> dict[int, list[Rollout]]:
    """Return what `save_groups` wrote; nothing where it wrote nothing. Raises EarlierVersion."""
    if not (folder / _ROLLOUTS).exists():
        return {}
    with np.load(folder / _ROLLOUTS, allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    if "sampled" not in columns:
        raise EarlierVersion(earlier_version(folder.parents[1], f"{folder.name} has answers in place of trajectories"))
    ends, rollouts = np.cumsum(columns["lengths"]).tolist(), list[Rollout]()
    for row, (name, score) in enumerate(json.loads((folder / _SCORES).read_text())):
        part = slice(ends[row] - int(columns["lengths"][row]), ends[row])
        tokens, sampled, log_probs, versions = (
            columns[name][part] for name in ("tokens", "sampled", "log_probs", "versions")
        )
        finish = FINISHES[columns["finishes"][row]]
        rollouts.append(
            Rollout(RolloutId(**name), tokens, sampled, log_probs, versions, finish, Score(**score) if score else None)
        )
    left = iter(rollouts)
    counts = zip(columns["groups"].tolist(), columns["counts"].tolist())
    return {number: list(islice(left, count)) for number, count in counts}


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
