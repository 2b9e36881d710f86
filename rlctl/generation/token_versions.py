"""Which weight version sampled which token of a rollout: counted at every change of weights, exact by construction.

Pure bookkeeping; the engine says who runs and how many tokens each has when the weights change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class TokenVersions:
    """Of all running rollouts, by name."""

    _of: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def begin(self, rollout: str, version: int) -> None:
        """A rollout enters while `version` is live."""
        self._of[rollout] = [(0, version)]

    def change(self, running: Iterable[tuple[str, int]], version: int) -> None:
        """`version` became live. running: (rollout, tokens sampled so far) of every one not yet ended."""
        for rollout, tokens in running:
            self._of[rollout].append((tokens, version))

    def forget(self, rollout: str) -> None:
        """A rollout ended without an answer."""
        self._of.pop(rollout, None)

    def end(self, rollout: str, length: int) -> NDArray[np.int32]:
        """A rollout ended with this many tokens: the version of each, int32 [length]."""
        spans = self._of.pop(rollout)
        starts = [min(start, length) for start, _ in spans] + [length]
        versions = np.array([version for _, version in spans], np.int32)
        return np.repeat(versions, np.diff(starts))
