"""What a trainer learns from: one `TrainingSample` a rollout or chat, packed into micro-batches by `plan.py`.

Everything is aligned to the token it speaks of: index t of a mask, a log-prob or a field is about tokens[t]
given tokens[:t]. Index 0 has no context, so its mask is false.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingSample:
    """tokens: int32 [T]. mask: bool [T], true where the token counts. fields: name -> float32 [T]."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    fields: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)
