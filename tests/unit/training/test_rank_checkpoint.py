"""Copies of a rank's state are in memory that was taken beside the steps before, and no copy is in two locked parts."""

import weakref
from concurrent.futures import Future
from itertools import pairwise
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


def state(*sizes: int) -> dict[int, TensorShard]:
    return {n: TensorShard.from_whole(torch.arange(size, dtype=torch.float32) + n) for n, size in enumerate(sizes)}


def sizes(shards: dict[int, TensorShard]) -> list[int]:
    return [each.tensor.nbytes for each in shards.values()]


def place(copies: dict[int, TensorShard]) -> int:
    return copies[0].tensor.untyped_storage().data_ptr()


def test_a_save_finds_the_memory_that_was_taken_for_it_and_the_next_one_finds_it_again() -> None:
    shards, copies = state(3, 1000, 0, 7), StateCopies(CPU, 1)
    copies.prepare(sizes(shards))
    assert copies._buffer
    room = copies._buffer.result(10.0)
    for version in range(2):
        for shard in shards.values():
            shard.tensor.add_(version)
        taken = copies.take(shards)
        assert place(taken) == room.untyped_storage().data_ptr()
        assert all(torch.equal(taken[n].tensor, shard.tensor) for n, shard in shards.items())
        assert all(taken[n].shape == shard.shape and taken[n].start == shard.start for n, shard in shards.items())


def test_memory_that_the_system_does_not_lock_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, unlocked = list[weakref.ref[torch.Tensor]](), list[int]()

    def lock(part: torch.Tensor, what: str) -> None:
        asked.append(weakref.ref(part))
        if len(asked) % 3 == 0:
            raise RuntimeError("not locked")

    monkeypatch.setattr(rank_checkpoint, "_LOCKED", 1)
    monkeypatch.setattr(rank_checkpoint, "lock_pages", lock)
    monkeypatch.setattr(rank_checkpoint, "unlock_pages", lambda part, stream: unlocked.append(part.numel()))
    monkeypatch.setattr(rank_checkpoint, "DeviceStream", lambda device: None)
    shards, copies = state(100, 100, 100), StateCopies(torch.device("cuda"), 1)
    for attempt in (1, 2):
        with pytest.raises(RuntimeError, match="not locked"):
            copies.take(shards)
        assert len(asked) == 3 * attempt and len(unlocked) == 2 * attempt
        assert all(part() is None for part in asked)


def test_files_that_are_written_as_the_wait_for_them_ends_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[Any]):
        """The work ends after the wait has, and before anybody looks again."""

        def result(self, timeout: float | None = None) -> Any:
            found = super().result()
            if timeout is None:
                return found
            raise TimeoutError

    monkeypatch.setattr(rank_checkpoint, "Future", Late)
    save = RankSave(0, 1, CPU, "nothing")
    save.begin(tmp_path, {}, 3, {}, None, copied=False)
    written = save.wait_for_files(0.01)
    assert written and [Path(name).is_file() for name in written.files] == [True]


def test_memory_of_other_sizes_is_free_before_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, alive = StateCopies(CPU, 1), list[bool]()
    copies.take(state(100))
    assert copies._buffer
    before = weakref.ref(copies._buffer.result())

    def free() -> SimpleNamespace:
        alive.append(before() is not None)
        return SimpleNamespace(available=1 << 40)

    monkeypatch.setattr(rank_checkpoint.psutil, "virtual_memory", free)
    copies.take(state(200))
    assert alive == [False]


def test_other_sizes_than_expected_get_memory_of_their_own() -> None:
    copies, more = StateCopies(CPU, 1), state(5, 2000)
    copies.prepare([20])
    assert all(torch.equal(each.tensor, more[n].tensor) for n, each in copies.take(more).items())


def test_too_little_memory_is_said_by_the_save_that_needs_it() -> None:
    shards, copies = state(100), StateCopies(CPU, 1 << 50)
    copies.prepare(sizes(shards))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"copies of the state take [0-9.]+ GiB of host memory, of which"):
            copies.take(shards)


def test_a_tensor_of_state_and_export_is_copied_once() -> None:
    one, other = state(1, 2).values()
    assert list(shards_by_id({"model.a": one}, {"a": one, "buffer": other}).values()) == [one, other]


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_parts_are_locked_in_turn_and_none_divides_a_tensor(held: list[int]) -> None:
    with patch.object(rank_checkpoint, "_LOCKED", 4096):
        parts = list(locked_parts(held))
    ends = {sum(-(-size // 512) * 512 for size in held[:count]) for count in range(len(held) + 1)}
    assert {at for part in parts for at in part} <= ends
    assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
    assert not sum(held) or (parts[0][0], parts[-1][1]) == (0, max(ends))
    assert all(end - begin >= 4096 for begin, end in parts[:-1])
