"""Saving of a rank's state: host copies use a buffer allocated before, and no copy crosses two page-locked parts."""

import weakref
from concurrent.futures import Future
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.training import rank_checkpoint
from rlctl.training.rank_checkpoint import RankSave, StateCopies, TensorShard, locked_parts, shards_by_id

CPU = torch.device("cpu")


def make_shards(*sizes: int) -> dict[int, TensorShard]:
    tensors = [torch.arange(size, dtype=torch.float32) + number for number, size in enumerate(sizes)]
    return {number: TensorShard.from_whole(tensor) for number, tensor in enumerate(tensors)}


def sizes_of(shards: dict[int, TensorShard]) -> list[int]:
    return [shard.tensor.nbytes for shard in shards.values()]


def address_of(copies: dict[int, TensorShard]) -> int:
    return copies[0].tensor.untyped_storage().data_ptr()


def test_a_save_finds_the_memory_that_was_taken_for_it_and_the_next_one_finds_it_again() -> None:
    shards = make_shards(3, 1000, 0, 7)
    copies = StateCopies(CPU, 1)
    copies.prepare(sizes_of(shards))
    assert copies._buffer
    buffer = copies._buffer.result(10.0)
    for version in range(2):
        for shard in shards.values():
            shard.tensor.add_(version)
        copied_shards = copies.take(shards)
        assert address_of(copied_shards) == buffer.untyped_storage().data_ptr()
        for number, shard in shards.items():
            copy = copied_shards[number]
            assert torch.equal(copy.tensor, shard.tensor)
            assert (copy.shape, copy.start) == (shard.shape, shard.start)


def test_memory_that_the_system_does_not_lock_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list[weakref.ref[torch.Tensor]]()
    unlocked_sizes = list[int]()

    def fail_every_third_time(part: torch.Tensor, purpose: str) -> None:
        parts.append(weakref.ref(part))
        if len(parts) % 3 == 0:
            raise RuntimeError("not locked")

    monkeypatch.setattr(rank_checkpoint, "_LOCKED", 1)
    monkeypatch.setattr(rank_checkpoint, "lock_pages", fail_every_third_time)
    monkeypatch.setattr(rank_checkpoint, "unlock_pages", lambda part, stream: unlocked_sizes.append(part.numel()))
    monkeypatch.setattr(rank_checkpoint, "DeviceStream", lambda device: None)
    shards = make_shards(100, 100, 100)
    copies = StateCopies(torch.device("cuda"), 1)
    for attempt in (1, 2):
        with pytest.raises(RuntimeError, match="not locked"):
            copies.take(shards)
        assert len(parts) == 3 * attempt and len(unlocked_sizes) == 2 * attempt
        assert all(part() is None for part in parts)


def test_files_that_are_written_as_the_wait_for_them_ends_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[Any]):
        """Future that raises TimeoutError although its work has just finished."""

        def result(self, timeout: float | None = None) -> Any:
            files = super().result()
            if timeout is None:
                return files
            raise TimeoutError

    monkeypatch.setattr(rank_checkpoint, "Future", Late)
    save = RankSave(0, 1, CPU, "nothing")
    save.begin(tmp_path, state={}, updates=3, weights={}, export=None, copied=False)
    written = save.wait_for_files(0.01)
    assert written and [Path(name).is_file() for name in written.files] == [True]


def test_memory_of_other_sizes_is_free_before_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = StateCopies(CPU, 1)
    copies.take(make_shards(100))
    assert copies._buffer
    first_buffer = weakref.ref(copies._buffer.result())
    was_alive = list[bool]()

    def measure_memory() -> SimpleNamespace:
        was_alive.append(first_buffer() is not None)
        return SimpleNamespace(available=1 << 40)

    monkeypatch.setattr(rank_checkpoint.psutil, "virtual_memory", measure_memory)
    copies.take(make_shards(200))
    assert was_alive == [False]


def test_other_sizes_than_expected_get_memory_of_their_own() -> None:
    copies = StateCopies(CPU, 1)
    shards = make_shards(5, 2000)
    copies.prepare([20])
    for number, copy in copies.take(shards).items():
        assert torch.equal(copy.tensor, shards[number].tensor)


def test_too_little_memory_is_said_by_the_save_that_needs_it() -> None:
    shards = make_shards(100)
    copies = StateCopies(CPU, 1 << 50)
    copies.prepare(sizes_of(shards))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"copies of the state take [0-9.]+ GiB of host memory, of which"):
            copies.take(shards)


def test_a_tensor_of_state_and_export_is_copied_once() -> None:
    weight, buffer = make_shards(1, 2).values()
    assert list(shards_by_id({"model.a": weight}, {"a": weight, "buffer": buffer}).values()) == [weight, buffer]


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_parts_are_locked_in_turn_and_none_divides_a_tensor(tensor_bytes: list[int]) -> None:
    with patch.object(rank_checkpoint, "_LOCKED", 4096):
        parts = list(locked_parts(tensor_bytes))
    boundaries = list(accumulate((-(-size // 512) * 512 for size in tensor_bytes), initial=0))
    assert set(chain.from_iterable(parts)) <= set(boundaries)
    assert all(part[1] == next_part[0] for part, next_part in pairwise(parts))
    if sum(tensor_bytes):
        assert (parts[0][0], parts[-1][1]) == (0, boundaries[-1])
    assert all(end - begin >= 4096 for begin, end in parts[:-1])
