"""Values of rollouts sorted by group, and sums over groups."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupedValues:
    """Values of n rollouts, sorted by (group, value), so that no sum over a group depends on the rollouts' order.

    Arrays with one value for each group are [groups]. Arrays with one value for each rollout are [n], in sorted order.
    """

    # float64 [n].
    values: Floats
    # intp [n]: index of the rollout of each sorted value.
    order: NDArray[np.intp]
    # intp [groups]: index in `values` of each group's first value.
    starts: NDArray[np.intp]
    # intp [groups]: number of values of each group.
    sizes: NDArray[np.intp]

    @classmethod
    def sort(cls, values: Floats, groups: NDArray[np.int64]) -> Self:
        """Sort `values` by `groups`, the number of each value's group."""
        order = np.lexsort((values, groups))
        _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
        return cls(values[order], order, starts, sizes)

    @cached_property
    def mean(self) -> Floats:
        """Mean of each group, [groups]. The mean of equal values is exactly their value, without rounding."""
        first = self.values[self.starts]
        uniform = first == self.values[self.starts + self.sizes - 1]
        mean: Floats = np.where(uniform, first, np.add.reduceat(self.values, self.starts) / self.sizes)
        return mean

    @cached_property
    def centred(self) -> Floats:
        """Values minus their group's mean, [n]."""
        return self.values - self.spread(self.mean)

    @cached_property
    def std(self) -> Floats:
        """Sample standard deviation of each group, [groups] (divisor: size - 1); 0 for a group of one value."""
        variance: Floats = np.add.reduceat(self.centred**2, self.starts) / np.maximum(self.sizes - 1, 1)
        return np.sqrt(variance)

    def spread(self, per_group: ArrayLike) -> Floats:
        """Return an array [n] with each group's number at all sorted values of the group. per_group: [groups]."""
        spread: Floats = np.repeat(np.asarray(per_group, np.float64), self.sizes)
        return spread

    def by_row(self, values: Floats) -> Floats:
        """Return `values` [n], which are in sorted order, in the order of the rollouts."""
        unsorted = np.empty_like(values)
        unsorted[self.order] = values
        return unsorted
