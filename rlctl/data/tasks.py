"""Draws from a data set: a `Task` that rollouts are attempts at (GRPO), or a `SupervisedSample` to imitate (SFT)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Task:
    """One draw of one row. A rollout is an attempt at a task.

    In a run with an environment the prompt is complete only when an episode begins. `tokens` is then empty, and `text`
    and `messages` are those of the row.
    """

    # Epoch and row of the draw, for example `e0-r17`.
    id: str
    # Token ids of the prompt.
    tokens: list[int]
    # Text of the prompt.
    text: str
    # Reference answer.
    answer: str | None
    # All columns of the row.
    row: dict[str, Any] = field(default_factory=dict)
    # Key of data.train.sources; empty if the run has no sources.
    source: str = ""
    # Messages of the prompt if the row is a chat, and always in a run with an environment.
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SupervisedSample:
    """One draw of one row to imitate. id, source: as in a `Task`."""

    id: str
    # Token ids, int32 [T].
    tokens: NDArray[np.int32]
    # bool [T], true for the tokens that are trained.
    mask: NDArray[np.bool_]
    source: str = ""
