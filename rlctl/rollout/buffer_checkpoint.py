"""Groups that wait for their step, in a checkpoint: two files, columns of numbers and their scores."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.requests import FINISHES, Rollout
from rlctl.rewards.scorer import Score

Rollouts = tuple[list[Rollout], list[Score]]
_ROLLOUTS, _SCORES = "groups.npz", "groups.json"


def save_groups(folder: Path, groups: Mapping[int, Rollouts]) -> None:
    """Write groups, by number, into `folder`."""
    completions = [completion for rollouts, _ in groups.values() for completion in rollouts]
    np.savez(
        folder / _ROLLOUTS,
        group_ids=np.array(list(groups), np.int64),
        counts=np.array([len(rollouts) for rollouts, _ in groups.values()], np.int64),
        lengths=np.array([len(completion.tokens) for completion in completions], np.int64),
        tokens=_joined([completion.tokens for completion in completions], np.int32),
        log_probs=_joined([completion.log_probs for completion in completions], np.float32),
        versions=_joined([completion.versions for completion in completions], np.int32),
        finishes=np.array([FINISHES.index(completion.finish) for completion in completions], np.int8),
    )
    scores = {str(group_id): [asdict(score) for score in scores] for group_id, (_, scores) in groups.items()}
    (folder / _SCORES).write_text(json.dumps(scores))


def load_groups(folder: Path) -> dict[int, Rollouts]:
    """What `save_groups` wrote; nothing where it wrote nothing."""
    if not (folder / _ROLLOUTS).exists():
        return {}
    with np.load(folder / _ROLLOUTS, allow_pickle=False) as columns:
        parts = {name: columns[name] for name in columns.files}
    scores = json.loads((folder / _SCORES).read_text())
    ends, row = np.cumsum(parts["lengths"]), 0
    groups: dict[int, Rollouts] = {}
    for group_id, count in zip(parts["group_ids"].tolist(), parts["counts"].tolist()):
        rollouts = [
            _completion(parts, str(group_id), slice(ends[i] - parts["lengths"][i], ends[i]), i)
            for i in range(row, row + count)
        ]
        groups[group_id] = rollouts, [Score(**score) for score in scores[str(group_id)]]
        row += count
    return groups


def _completion(parts: Mapping[str, NDArray[np.generic]], name: str, where: slice, row: int) -> Rollout:
    finish = FINISHES[int(parts["finishes"][row])]
    tokens, log_probs, versions = (parts[key][where] for key in ("tokens", "log_probs", "versions"))
    return Rollout(name, tokens, log_probs, versions, finish)  # type: ignore[arg-type]


def _joined(parts: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
