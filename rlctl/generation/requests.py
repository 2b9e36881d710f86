"""What goes into an engine and what comes out: tokens both ways, never text."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SampleRequest:
    """One rollout to sample. Temperature 0 is greedy; `seed` makes it repeatable whatever runs beside it."""

    id: str
    prompt_tokens: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """One sampled rollout.

    tokens: int32 [n], the stop token included. log_probs: float32 [n], of the distribution that was sampled
    from (after temperature, top-k, top-p). versions: int32 [n], weight version that sampled each token.
    """

    request_id: str
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    engine: int
