"""Cursor over a data set: an endless, resumable order of rows whose whole state is {epoch, index, rows}.

The order of an epoch is a pure function of (seed, epoch), so a resume replays no draws. Every row comes exactly once in
an epoch, for any batch sizes. A batch may reach into the next epoch, so that no batch is shorter than others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlctl.data.files import DataError
from rlctl.data.tasks import SupervisedSample, Task

Drawn = TypeVar("Drawn", Task, SupervisedSample)


@dataclass(frozen=True)
class Draw:
    """One draw of a row."""

    epoch: int
    # Index of the row in the data set.
    row: int


class DrawOrder(Protocol):
    """Endless order of draws."""

    @property
    def position(self) -> int:
        """Number of the next draw, from 0 on."""

    def draw(self, n: int) -> list[Draw]:
        """Return the next n draws."""

    def draw_at(self, number: int) -> Draw:
        """Return the draw with this number, from 0 on. It may be past or to come."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state of `state_dict`. Raises DataError for the state of other data."""


class Cursor:
    """Order of draws over `num_rows` rows. With `shuffle` each epoch has another order; else it is 0, 1, 2, ..."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise DataError("the data set is empty")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._index = 0
        self._order = self._order_of(0)
        # Epoch and order that `draw_at` used last for another epoch than the current one.
        self._other_epoch = 0
        self._other_order = self._order

    def draw(self, n: int) -> list[Draw]:
        """Return the next n draws. They may reach into the next epochs."""
        draws: list[Draw] = []
        while len(draws) < n:
            rows = self._order[self._index : self._index + n - len(draws)]
            draws += [Draw(self._epoch, int(row)) for row in rows]
            self._move_to(self._epoch, self._index + len(rows))
        return draws

    @property
    def position(self) -> int:
        """Number of the next draw, from 0 on."""
        return self._epoch * self._num_rows + self._index

    def draw_at(self, number: int) -> Draw:
        """Return the draw with this number, from 0 on. It may be past or to come."""
        epoch, index = divmod(number, self._num_rows)
        if epoch == self._epoch:
            return Draw(epoch, int(self._order[index]))
        if epoch != self._other_epoch:
            self._other_order = self._order_of(epoch)
            self._other_epoch = epoch
        return Draw(epoch, int(self._other_order[index]))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "index": self._index, "rows": self._num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a state of `state_dict`. Raises DataError if the data set had another number of rows then."""
        if state["rows"] != self._num_rows:
            raise DataError(
                f"the checkpoint was made with {state['rows']} rows, the data set now has {self._num_rows}: "
                "prompts would be lost or trained twice"
            )
        self._move_to(state["epoch"], state["index"])

    def _move_to(self, epoch: int, index: int) -> None:
        if index == self._num_rows:
            epoch += 1
            index = 0
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        self._epoch = epoch
        self._index = index

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)


class RowSource(Generic[Drawn]):
    """Source of rows in the cursor's order. Row `r17` drawn in epoch 2 is named `e2-r17`."""

    def __init__(self, rows: Sequence[Drawn], cursor: DrawOrder) -> None:
        self._rows: Sequence[Drawn] = rows
        self.cursor = cursor

    def draw(self, n: int) -> list[Drawn]:
        return [self._name_row(draw) for draw in self.cursor.draw(n)]

    def row_at(self, number: int) -> Drawn:
        """Return the row of the draw with this number. The draw may be past or to come."""
        return self._name_row(self.cursor.draw_at(number))

    def read_ahead(self, first: int, n: int) -> list[Drawn]:
        """Return the rows of n draws from number `first` on. The cursor does not move."""
        return [self.row_at(number) for number in range(first, first + n)]

    def _name_row(self, draw: Draw) -> Drawn:
        row = self._rows[draw.row]
        return replace(row, id=f"e{draw.epoch}-{row.id}")


TaskSource = RowSource[Task]
SampleSource = RowSource[SupervisedSample]
