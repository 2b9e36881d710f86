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


def share(count: int) -> Share:
    return Share(np.zeros(count, np.int32), {"log_prob": np.zeros(count, np.float32)})


class Store:
    """Ray's store as a list."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def put(self, value: Any) -> int:
        self.held.append(value)
        return len(self.held) - 1

    def get(self, ref: int) -> Any:
        return self.held[ref]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    held = Store()
    monkeypatch.setattr(rlctl.workers.shared_arguments, "ray", held)
    yield held


def test_a_shards_batch_is_put_once_and_reaches_the_shards_ranks_alone(store: Store) -> None:
    first, second, loss = share(20_000), share(20_000), object()
    arguments = put_common([(first, loss), (first, loss), (second, loss), (second, loss)])
    assert store.held == [first, second]
    assert [fetch_values(each) for each in arguments] == [(first, loss)] * 2 + [(second, loss)] * 2


def test_small_arguments_and_those_of_one_rank_travel_with_their_call(store: Store) -> None:
    own, small = [share(20_000), share(20_000)], share(4)
    arguments = [(own[0], small, 7), (own[1], small, 7)]
    assert put_common(arguments) == arguments
    assert store.held == []


def test_what_was_put_serves_any_number_of_calls(store: Store) -> None:
    argument: Any = put_once("a plan")
    assert isinstance(argument, SharedArgument)
    assert [fetch_values((argument, rank)) for rank in range(3)] == [("a plan", rank) for rank in range(3)]
    assert store.held == ["a plan"]


def test_arrays_are_counted_wherever_they_are() -> None:
    array = np.zeros(10, np.int32)
    assert array_bytes([share(10), (array, {"a": array}), "text", None]) == 80 + 80
