"""Draws from a data set: a `Task` that rollouts are attempts at (GRPO), or a `SupervisedSample` to imitate (SFT)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Task:
    """One draw of one row; a rollout is an attempt at it. tokens: the prompt.

    `id` names the draw (`e0-r17`: epoch 0, row 17), so that equal texts are told apart. In a run with an environment
    the prompt is known once an episode begins: `tokens` is empty, `text` and `messages` are of the row alone.
    """

    id: str
    tokens: list[int]
    text: str
    answer: str | None
    row: dict[str, Any] = field(default_factory=dict)
    # Key of data.train.sources; empty if there are none.
    source: str = ""
    # The prompt of a row that is a chat, and of every row in a run with an environment.
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SupervisedSample:
    """One draw of one row to imitate: `tokens` int32 [T], `mask` bool [T], true where a token is trained on."""

    id: str
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    # As of a `Task`.
    source: str = ""
