"""Arguments that several ranks have in common leave the driver once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlctl.workers.shared_arguments
from rlctl.workers.shared_arguments import SharedArgument, array_bytes, fetch_values, put_common, put_once


@dataclass(frozen=True)
class Share:
    tokens: NDArray[np.int32]
    columns: dict[str, NDArray[np.float32]]


def make_share(count: int) -> Share:
    return Share(np.zeros(count, np.int32), {"log_prob": np.zeros(count, np.float32)})


class Store:
    """Ray's store as a list."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def get(self, ref: int) -> Any:
        return self.values[ref]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(rlctl.workers.shared_arguments, "ray", store)
    yield store


def test_a_shards_batch_is_put_once_and_reaches_the_shards_ranks_alone(store: Store) -> None:
    first = make_share(20_000)
    second = make_share(20_000)
    loss = object()
    arguments_by_rank = put_common([(first, loss), (first, loss), (second, loss), (second, loss)])
    assert store.values == [first, second]
    assert [fetch_values(arguments) for arguments in arguments_by_rank] == [(first, loss)] * 2 + [(second, loss)] * 2


def test_small_arguments_and_those_of_one_rank_travel_with_their_call(store: Store) -> None:
    small = make_share(4)
    arguments_by_rank = [(make_share(20_000), small, 7), (make_share(20_000), small, 7)]
    assert put_common(arguments_by_rank) == arguments_by_rank
    assert store.values == []


def test_what_was_put_serves_any_number_of_calls(store: Store) -> None:
    argument: Any = put_once("a plan")
    assert isinstance(argument, SharedArgument)
    assert [fetch_values((argument, rank)) for rank in range(3)] == [("a plan", rank) for rank in range(3)]
    assert store.values == ["a plan"]


def test_arrays_are_counted_wherever_they_are() -> None:
    array = np.zeros(10, np.int32)
    assert array_bytes([make_share(10), (array, {"a": array}), "text", None]) == 80 + 80
