"""READY groups in a checkpoint: token columns in one file, scores and conversations in another."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.requests import FINISHES, RolloutId
from rlctl.preflight.version import earlier_version
from rlctl.rewards.scorer import Score
from rlctl.rollout.conversation import TrajectoryRow
from rlctl.rollout.types import PlayedEpisode, Rollout
from rlctl.run.checkpoints import EarlierVersion

# Files of a checkpoint.
_ROLLOUTS = "groups.npz"
_SCORES = "groups.json"
# Columns of `TrajectoryRow`, with their dtypes.
_COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "sampled": np.bool_,
    "log_probs": np.float32,
    "versions": np.int32,
    "turns": np.int16,
}


def save_groups(folder: Path, groups: Mapping[int, list[Rollout]]) -> None:
    """Write the rollouts of groups into `folder`. groups: group number -> rollouts."""
    rollouts = list(chain.from_iterable(groups.values()))
    rows = list(chain.from_iterable(rollout.rows for rollout in rollouts))
    columns: dict[str, Any] = {
        "groups": np.array(list(groups), np.int64),
        "counts": np.array([len(group_rollouts) for group_rollouts in groups.values()], np.int64),
        "rows": np.array([len(rollout.rows) for rollout in rollouts], np.int64),
        "lengths": np.array([len(row.tokens) for row in rows], np.int64),
        "finishes": np.array([FINISHES.index(rollout.finish) for rollout in rollouts], np.int8),
    }
    columns |= {name: _concatenate([getattr(row, name) for row in rows], dtype) for name, dtype in _COLUMNS.items()}
    np.savez(folder / _ROLLOUTS, **columns)
    records = [
        [asdict(rollout.id), rollout.score and asdict(rollout.score), rollout.episode and asdict(rollout.episode)]
        for rollout in rollouts
    ]
    (folder / _SCORES).write_text(json.dumps(records))


def load_groups(folder: Path) -> dict[int, list[Rollout]]:
    """Return the groups that `save_groups` wrote: group number -> rollouts. Return {} if the files are missing.

    Raises EarlierVersion for files of an earlier release.
    """
    if not (folder / _ROLLOUTS).exists():
        return {}
    with np.load(folder / _ROLLOUTS, allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    if "rows" not in columns:
        raise EarlierVersion(earlier_version(folder.parents[1], f"{folder.name} has answers in place of trajectories"))
    # The columns have the rows of all rollouts, and the rollouts of all groups, one after the other. So each rollout
    # takes its number of rows from one iterator, and each group its number of rollouts from another.
    ends = np.cumsum(columns["lengths"]).tolist()
    starts = [0, *ends[:-1]]
    rows = iter(
        [TrajectoryRow(**{name: columns[name][start:end] for name in _COLUMNS}) for start, end in zip(starts, ends)]
    )
    records = json.loads((folder / _SCORES).read_text())
    rollouts = iter(
        [
            Rollout(
                id=RolloutId(**rollout_id),
                rows=tuple(islice(rows, int(num_rows))),
                finish=FINISHES[finish],
                score=score and Score(**score),
                episode=episode and PlayedEpisode(**episode),
            )
            for (rollout_id, score, episode), num_rows, finish in zip(
                records, columns["rows"], columns["finishes"], strict=True
            )
        ]
    )
    counts = zip(columns["groups"].tolist(), columns["counts"].tolist())
    return {number: list(islice(rollouts, count)) for number, count in counts}


def _concatenate(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
