"""What goes into an engine and what comes out: tokens both ways, never text.

A request is one prompt and the number of rollouts wanted of it (its group), so that a group shares its prompt's
prefix. Answers travel between processes as columns (`PackedRollouts`), not as thousands of small arrays.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class TurnRequest:
    """A group to sample. Temperature 0 is greedy; rollout i is drawn with `seed + i`, whatever runs beside it."""

    id: str
    prompt_tokens: list[int]
    num_samples: int
    max_new_tokens: int
    temperature: float
    seed: int

    @property
    def cost(self) -> int:
        """Tokens that this request may keep an engine busy with."""
        return self.num_samples * self.max_new_tokens + len(self.prompt_tokens)


@dataclass(frozen=True)
class Rollout:
    """One sampled rollout.

    tokens: int32 [n], the stop token included. log_probs: float32 [n], of the distribution that was sampled
    from (after temperature, top-k, top-p). versions: int32 [n], weight version that sampled each token.
    """

    request_id: str
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish


@dataclass(frozen=True)
class PackedRollouts:
    """The rollouts of several requests, one column a kind of value.

    lengths: int32 [n] tokens a rollout, in the order of the requests and of the samples within each. tokens,
    log_probs, versions: [sum of lengths]. finishes: int8 [n], index into FINISHES.
    """

    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finishes: NDArray[np.int8]

    def split(self, requests: list[TurnRequest]) -> list[list[Rollout]]:
        """The completions of each request."""
        ends = np.cumsum(self.lengths)
        groups, row = [], 0
        for request in requests:
            group = []
            for _ in range(request.num_samples):
                part = slice(ends[row] - self.lengths[row], ends[row])
                finish = FINISHES[self.finishes[row]]
                group.append(Rollout(request.id, self.tokens[part], self.log_probs[part], self.versions[part], finish))
                row += 1
            groups.append(group)
        return groups
