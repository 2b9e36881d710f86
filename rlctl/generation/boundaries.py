"""Which weight version sampled which token of a rollout: counted at every change of weights, exact by construction.

Pure bookkeeping; the engine says who runs and how many tokens each has when the weights change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Boundaries:
    """Of all running rollouts; a rollout is named by its request's id and its index among the request's samples."""

    _of: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def begin(self, request: str, samples: int, version: int) -> None:
        """A request enters while `version` is live."""
        for index in range(samples):
            self._of[request, index] = [(0, version)]

    def change(self, running: Iterable[tuple[str, int, int]], version: int) -> None:
        """`version` became live. running: (request, index, tokens sampled so far) of every rollout not yet ended."""
        for request, index, tokens in running:
            self._of[request, index].append((tokens, version))

    def forget(self, request: str) -> None:
        """A request ended without an answer."""
        for name in [name for name in self._of if name[0] == request]:
            del self._of[name]

    def end(self, request: str, lengths: list[int]) -> NDArray[np.int32]:
        """A request ended with rollouts of these lengths: the version of every token, int32 [sum of lengths]."""
        return np.concatenate([_spread(self._of.pop((request, index)), n) for index, n in enumerate(lengths)])


def _spread(spans: list[tuple[int, int]], length: int) -> NDArray[np.int32]:
    starts = [min(start, length) for start, _ in spans] + [length]
    versions = np.array([version for _, version in spans], np.int32)
    return np.repeat(versions, np.diff(starts))
