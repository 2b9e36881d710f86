"""Mixture of data sets: the number of a draw alone decides its source and its row.

Among the first n draws, source i of weight w_i has n w_i / (w_1 + w_2 + ...) draws, to within one or two. This is the
Webster/Sainte-Lague method: the k-th draw of source i, from 0 on, is due at (k + 1/2) / w_i. The order does not depend
on which rollouts end first, so a slow source keeps its share, and a resume needs only the number. Each source has its
order and its epochs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from rlctl.config.schema import RunConfig, SftConfig
from rlctl.data.cursor import Cursor, Draw, Drawn, DrawOrder
from rlctl.data.files import DataError
from rlctl.data.tasks import SupervisedSample

# Largest denominator of a weight as a fraction.
_PRECISION = 10**6
# Number of first steps of a run from which its packing is estimated.
_STEPS = 200


def order_of(rows: Sequence[Drawn], config: RunConfig) -> DrawOrder:
    """Return the order in which a run draws its rows. In `rows` each source's rows stand together. Raises DataError."""
    sources = config.data.train.sources
    seed = config.run.seed
    row_counts = Counter(row.source for row in rows)
    # Rows of the section data.validation belong to no source.
    if not sources or not all(row_counts[name] for name in sources):
        return Cursor(len(rows), seed, config.data.shuffle)
    weights = [section.weight for section in sources.values()]
    return MixedCursor({name: row_counts[name] for name in sources}, weights, seed, config.data.shuffle)


def step_lengths(samples: list[SupervisedSample], config: SftConfig) -> Iterator[list[int]]:
    """Yield the lengths in tokens of the sequences of each of the first `_STEPS` steps."""
    lengths = [len(sample.tokens) for sample in samples]
    cursor = order_of(samples, config)
    for _ in range(min(_STEPS, config.sft.num_steps)):
        yield [lengths[draw.row] for draw in cursor.draw(config.sft.batch_size)]


def first_of_each(rows: Sequence[Drawn], limit: int | None) -> list[Drawn]:
    """Return at most `limit` rows: the first row of each source, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for row in rows:
        ranks.append(seen[row.source])
        seen[row.source] += 1
    return [rows[index] for index in sorted(range(len(rows)), key=ranks.__getitem__)][:limit]


class Shares:
    """Exact apportionment of draws among sources."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Take the sources' weights, above 0. Only their ratios matter."""
        ratios = [Fraction(weight).limit_denominator(_PRECISION) for weight in weights]
        denominator = lcm(*(ratio.denominator for ratio in ratios))
        self._weights = [max(1, int(ratio * denominator)) for ratio in ratios]
        self._total = sum(self._weights)
        # Time between two draws of each source, in units of 1 / lcm(weights).
        self._gaps = [lcm(*self._weights) // weight for weight in self._weights]

    def counts(self, number: int) -> list[int]:
        """Return for each source how many of the first `number` draws it has."""
        # At most `number` draws are due at this time. The remaining draws are given out one by one.
        time = max(0, number - len(self._weights))
        counts = [(2 * weight * time + self._total) // (2 * self._total) for weight in self._weights]
        for _ in range(number - sum(counts)):
            counts[self._next_source(counts)] += 1
        return counts

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of a draw, and its number among the draws of that source."""
        counts = self.counts(number)
        source = self._next_source(counts)
        return source, counts[source]

    def _next_source(self, counts: Sequence[int]) -> int:
        """Return the index of the source whose next draw is due first. Ties go to the lower index."""
        return min(range(len(counts)), key=lambda source: (2 * counts[source] + 1) * self._gaps[source])


class MixedCursor:
    """Cursor over several sources. Rows are numbered one source after the other. The state is the position."""

    def __init__(self, sizes: Mapping[str, int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        """Take the number of rows by source's name, and the sources' weights. Raises DataError for no rows."""
        self._sizes = dict(sizes)
        self._weights = list(weights)
        self._shares = Shares(weights)
        seeds = np.random.SeedSequence(seed).generate_state(len(sizes), np.uint64)
        self._cursors = [Cursor(size, int(row_seed), shuffle) for size, row_seed in zip(sizes.values(), seeds)]
        # Index of each source's first row.
        self._first_rows = [0, *np.cumsum(list(sizes.values())).tolist()]
        self._position = 0

    @property
    def position(self) -> int:
        """Number of the next draw, from 0 on."""
        return self._position

    def draw(self, n: int) -> list[Draw]:
        """Draw the next n rows."""
        draws = [self.draw_at(number) for number in range(self._position, self._position + n)]
        self._position += n
        return draws

    def draw_at(self, number: int) -> Draw:
        """Return the draw with this number, which may be past or to come. Its epoch is the source's epoch."""
        source, source_number = self._shares.source(number)
        draw = self._cursors[source].draw_at(source_number)
        return Draw(draw.epoch, self._first_rows[source] + draw.row)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "sources": self._sizes, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state of `state_dict`. Raises DataError if sources, numbers of rows or weights differ."""
        sizes = state.get("sources")
        weights = state.get("weights")
        if sizes != self._sizes or weights != self._weights:
            raise DataError(
                f"the checkpoint was made with the sources {sizes} of weights {weights}, now they are {self._sizes} "
                f"of {self._weights}: prompts would be lost or trained twice"
            )
        self._position = state["position"]
