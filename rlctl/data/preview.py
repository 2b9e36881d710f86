"""Preview of a run's data: lengths, and text with trained tokens apart from the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import SftConfig
from rlctl.data.mixture import order_of
from rlctl.data.tasks import SupervisedSample

# First steps of a run from which its packing is estimated.
_STEPS = 200


@dataclass(frozen=True)
class Lengths:
    """Lengths of sequences, in tokens, after cutting."""

    total: int
    mean: float
    median: float
    p90: float
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Lengths":
        """Return those of at least one sequence."""
        median, p90 = np.percentile(lengths, (50, 90))
        return cls(sum(lengths), float(np.mean(lengths)), float(median), float(p90), max(lengths))


def step_lengths(samples: list[SupervisedSample], config: SftConfig) -> Iterator[list[int]]:
    """Yield the lengths of the sequences of each of the run's first steps."""
    lengths = [len(sample.tokens) for sample in samples]
    cursor = order_of(samples, config)
    for _ in range(min(_STEPS, config.sft.num_steps)):
        yield [lengths[draw.row] for draw in cursor.draw(config.sft.batch_size)]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all trained on, or all not."""

    text: str
    trained: bool
    # True if more follows that is not shown.
    truncated: bool = False


def pieces(sample: SupervisedSample, tokenizer: Any, most: int) -> list[Piece]:
    """Return the text of a sample's first `most` tokens, cut where the mask changes."""
    mask: NDArray[np.bool_] = sample.mask[:most]
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    spans = [(start, end) for start, end in pairwise(cuts) if end > start]
    found = [Piece(tokenizer.decode(sample.tokens[start:end].tolist()), bool(mask[start])) for start, end in spans]
    return [*found, Piece("", False, truncated=True)] if len(sample.tokens) > most else found
